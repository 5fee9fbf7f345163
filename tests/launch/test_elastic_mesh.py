"""Batch axes shrink first when devices are gone."""

import itertools
import math

import pytest

from sharding.launch.config.mesh_config import BATCH_AXES
from sharding.launch.elastic_mesh import fewer_devices


@pytest.mark.parametrize(
    ("axes", "there", "fewer"),
    [
        ({"data": 8}, 4, {"data": 4}),
        ({"data": 2, "tensor": 4}, 4, {"data": 1, "tensor": 4}),
        ({"data": 2, "tensor": 4}, 2, {"data": 1, "tensor": 2}),
        ({"fsdp": 4, "data": 2}, 4, {"fsdp": 4, "data": 1}),
        ({"data": -1, "tensor": 2}, 4, {"data": -1, "tensor": 2}),
    ],
)
def test_a_mesh_for_fewer_devices(axes: dict[str, int], there: int, fewer: dict[str, int]):
    assert fewer_devices(axes, there) == fewer


def test_no_axis_is_halved_more_than_it_must():
    """Each axis is halved as far as it can be before the next one, until what is left fits, and no further."""
    names = ("tensor", "fsdp", "pipe", "data")
    for sizes in itertools.product((1, 2, 4, 6), (1, 3, 4), (2, 3), (1, 2, 8)):
        axes = dict(zip(names, sizes, strict=True))
        order = [*(axis for axis in BATCH_AXES if axis in axes), "pipe", "tensor"]
        halves = [axis for axis in order for _ in range((axes[axis] & -axes[axis]).bit_length() - 1)]
        for available in (1, 3, 4, 16, 200):
            fits = (n for n in range(len(halves) + 1) if math.prod(sizes) // 2**n <= available)
            expected = dict(axes)
            for axis in halves[: next(fits, len(halves))]:
                expected[axis] //= 2
            found = fewer_devices(axes, available)
            assert found == expected and list(found) == list(names)
