"""The order of real devices: slices outermost, or in order with a warning."""

import dataclasses
import itertools

import numpy as np
import pytest

from sharding.hardware.physical_mesh import across_slices, device_array


@dataclasses.dataclass(frozen=True)
class Tpu:
    id: int
    coords: tuple[int, int, int]
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    core_on_chip: int = 0

    @property
    def process_index(self):
        return self.id // 4


def devices(slices, torus):
    places = itertools.product(range(slices), *map(range, torus))
    return [Tpu(n, tuple(place), index) for n, (index, *place) in enumerate(places)]


@pytest.mark.parametrize(
    ("shape", "slices", "expected"),
    [((4, 4), 2, (2, 1)), ((2, 8), 4, (2, 2)), ((3, 8), 2, (1, 2)), ((6, 4), 6, (6, 1))],
)
def test_major_axes_cross_slices(shape, slices, expected):
    assert across_slices(shape, slices) == expected


def test_slices_that_no_axes_divide_into():
    with pytest.raises(ValueError, match="3 slices"):
        across_slices((4, 4), 3)


def test_several_slices_are_a_hybrid_mesh():
    found = device_array(devices(2, (2, 2, 2)), {"data": 4, "tensor": 4}, asked="mesh")
    assert found.shape == (4, 4)
    assert [{d.slice_index for d in row} for row in found] == [{0}, {0}, {1}, {1}]


def test_a_mesh_that_does_not_fold_is_in_order_with_a_warning():
    given = devices(1, (4, 4, 4))
    with pytest.warns(UserWarning, match="mesh: the sizes do not fold onto the torus 4x4x4, of which there are 64"):
        found = device_array(given, {"data": 8, "tensor": 8}, asked="mesh")
    assert found.flatten().tolist() == given
    assert device_array(given, {"data": 4, "tensor": 16}, asked="mesh").shape == (4, 16)


def test_slices_that_do_not_divide_are_reported():
    with pytest.warns(UserWarning, match="onto 2 slices of the torus 2x2x2, of which there are 9 devices"):
        found = device_array(devices(2, (2, 2, 2))[:9], {"data": 3, "tensor": 3}, asked="mesh")
    assert np.shape(found) == (3, 3)
