"""Batch axes shrink first when devices are gone."""

import pytest

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
