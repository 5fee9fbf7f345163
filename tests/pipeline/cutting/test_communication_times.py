"""Transfer times against a microbatch sent sample by sample."""

import math
import random

import pytest

from sharding.errors import ShardingError
from sharding.pipeline.cutting import Machines
from sharding.pipeline.cutting.communication_times import all_reduce_time_per_byte, transfer_time_per_byte

THREE = Machines(machines=3, devices=4, inside=10, between=1)


def test_scattered_stages_send_inside_machines():
    two = Machines(machines=2, devices=4, inside=10, between=1)
    scattered = transfer_time_per_byte(two, (0, 1, 4, 5), (2, 3, 6, 7))
    apart = transfer_time_per_byte(two, (0, 1, 2, 3), (4, 5, 6, 7))
    assert (scattered, apart) == (1 / 4 / 10, 1 / 4)
    assert all_reduce_time_per_byte(two, (0, 1, 4, 5)) == 1.5
    assert all_reduce_time_per_byte(two, (0, 1, 2, 3)) == 0.15


@pytest.mark.parametrize(
    ("senders", "receivers", "time"),
    [
        ([0], [1], 1 / 10),
        ([0], [4], 1),
        ([0], [1, 2], 1 / 10),
        ([0, 1], [4], 1),
        ([0], [1, 4], 1 / 2 / 10 + 1 / 2),
        ([0, 1], [4, 5, 6], 1 / 2),
    ],
)
def test_the_busiest_device_decides(senders, receivers, time):
    assert transfer_time_per_byte(THREE, senders, receivers) == pytest.approx(time)


def sample_by_sample(machines, senders, receivers):
    """Transfer of a microbatch whose samples divide evenly over both stages, each from the device that has it."""
    samples = math.lcm(len(senders), len(receivers))
    taken = dict.fromkeys([*senders, *receivers], 0.0)
    for sample in range(samples):
        pair = senders[sample * len(senders) // samples], receivers[sample * len(receivers) // samples]
        same = pair[0] // machines.devices == pair[1] // machines.devices
        for device in pair:
            taken[device] += 1 / samples / (machines.inside if same else machines.between)
    return max(taken.values())


def test_transfers_sample_by_sample():
    numbers = random.Random(0)
    for _ in range(100):
        devices = numbers.sample(range(12), numbers.randint(2, 12))
        split = numbers.randint(1, len(devices) - 1)
        senders, receivers = sorted(devices[:split]), sorted(devices[split:])
        expected = sample_by_sample(THREE, senders, receivers)
        assert transfer_time_per_byte(THREE, senders, receivers) == pytest.approx(expected)
        assert transfer_time_per_byte(THREE, receivers, senders) == pytest.approx(expected)


def test_one_device_reduces_nothing():
    assert all_reduce_time_per_byte(THREE, (7,)) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [({"machines": 0}, "machines=0"), ({"devices": -1}, "devices=-1"), ({"between": 0}, r"between\)\n  found:    0")],
)
def test_machines_that_cannot_be(change, words):
    with pytest.raises(ShardingError, match=words):
        Machines(**({"machines": 2, "devices": 2, "inside": 1, "between": 1} | change))
