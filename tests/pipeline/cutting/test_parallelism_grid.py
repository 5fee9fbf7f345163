"""The grid of degrees: what it has, and that its programs take what formulas say where there are any."""

import dataclasses
import itertools
import math

import pytest

from sharding.errors import ShardingError
from sharding.pipeline import schedules
from sharding.pipeline.cutting import LayerChain, grid
from sharding.pipeline.cutting.parallelism_grid import degrees, simulated

EVEN = LayerChain(
    forward=[8.0] * 4,
    backward=[16.0] * 4,
    activation_bytes=[64.0] * 4,
    weight_bytes=[160.0] * 4,
    state_bytes=[800.0] * 4,
    batch=16,
    bandwidth=100.0,
)
FREE = dataclasses.replace(EVEN, bandwidth=math.inf)


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (4, 6), (16, 15)])
def test_all_degrees(devices, count):
    found = list(degrees(devices))
    assert len(set(found)) == len(found) == count
    powers = [1 << k for k in range(devices.bit_length())]
    assert set(found) == {three for three in itertools.product(powers, repeat=3) if math.prod(three) == devices}


def test_one_device_takes_all_layers():
    point = simulated(EVEN, 1, 1, 1, 1)
    assert point.seconds == 4 * (8 + 16)
    assert point.peak_bytes == 4 * (800 + 64)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 16)])
def test_without_communication_it_is_the_schedule(stages, microbatches):
    point = simulated(FREE, 1, 1, stages, microbatches)
    forward, backward = 32 / stages / microbatches, 64 / stages / microbatches
    schedule = schedules.one_f_one_b(stages=stages, microbatches=microbatches)
    assert point.seconds == pytest.approx(schedule.simulate(forward=forward, backward=backward).makespan)


def test_data_and_tensor_degrees_by_formula():
    data = simulated(EVEN, 4, 1, 1, 1)
    assert data.seconds == pytest.approx(96 / 4 + 2 * 640 * 3 / 4 / 100)
    assert data.peak_bytes == 4 * 800 + 4 * 64 / 4
    tensor = simulated(EVEN, 1, 4, 1, 1)
    assert tensor.seconds == pytest.approx(96 / 4 + 2 * 4 * 2 * 64 * 3 / 4 / 100)
    assert tensor.peak_bytes == 4 * 800 / 4 + 4 * 64


def test_the_fastest_first_and_what_does_not_fit_left_out():
    points = grid(EVEN, devices=8)
    assert [point.seconds for point in points] == sorted(point.seconds for point in points)
    limit = sorted(point.peak_bytes for point in points)[len(points) // 3]
    fitting = grid(EVEN, devices=8, memory_bytes=limit)
    assert set(fitting) == {point for point in points if point.peak_bytes <= limit}
    assert all(point.data * point.tensor * point.stages == 8 for point in points)


def test_large_weights_are_not_replicated():
    heavy = dataclasses.replace(EVEN, weight_bytes=[1e6] * 4)
    assert grid(heavy, devices=4)[0].data == 1
    light = dataclasses.replace(EVEN, activation_bytes=[1e6] * 4, weight_bytes=[0.0] * 4)
    assert grid(light, devices=4)[0].data == 4


def test_launches_make_microbatches_costly():
    slow = dataclasses.replace(FREE, launch=10.0)
    assert grid(slow, devices=1)[0].microbatches == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 6}, "a power of two"),
        ({"devices": 0}, "positive integers"),
        ({"devices": 4, "microbatches": (3, 5)}, "divide 16"),
        ({"devices": 4, "microbatches": ()}, "divide 16"),
        ({"devices": 1, "memory_bytes": 10}, "memory_bytes=3[0-9]+ or more"),
    ],
)
def test_bad_requests(options, message):
    with pytest.raises(ShardingError, match=message):
        grid(EVEN, **options)
