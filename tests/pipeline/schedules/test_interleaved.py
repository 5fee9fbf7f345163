"""Interleaved 1F1B against its closed forms."""

import itertools

import pytest

from sharding.errors import ShardingError
from sharding.pipeline import schedules


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_bubbles(stages, chunks):
    """The bubble is (p - 1)/(M v) of the busy time."""
    for microbatches, backward in itertools.product(multiples(stages), (1.0, 2.0)):
        schedule = schedules.interleaved(stages=stages, microbatches=microbatches, chunks=chunks)
        simulation = schedule.simulate(forward=1.0, backward=backward)
        ideal = microbatches * (1 + backward)
        assert simulation.makespan - ideal == pytest.approx(ideal * (stages - 1) / (microbatches * chunks))


def multiples(stages):
    return [groups * stages for groups in (1, 2, 3, 5)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_peaks(stages, chunks):
    """Device r warms up with 2 (p - r - 1) + (v - 1) p chunks; the steady state adds one."""
    for microbatches in multiples(stages):
        check_peaks(stages, microbatches, chunks)


def check_peaks(stages, microbatches, chunks):
    simulation = schedules.interleaved(stages=stages, microbatches=microbatches, chunks=chunks).simulate()
    ahead = [2 * (stages - r - 1) + (chunks - 1) * stages + 1 for r in range(stages)]
    most = microbatches * chunks
    expected = [most if microbatches == stages else min(count, most) for count in ahead]
    assert simulation.peak_activations == pytest.approx([count / chunks for count in expected])
    if microbatches >= 2 * stages:
        assert simulation.peak_activations[0] == pytest.approx(stages * (1 + (stages - 1) / (stages * chunks)))


def test_published_instance():
    simulation = schedules.interleaved(stages=4, microbatches=8, chunks=2).simulate(forward=1.0, backward=2.0)
    assert simulation.makespan == 28.5
    assert simulation.idle == (4.5,) * 4
    assert simulation.peak_activations == (5.5, 4.5, 3.5, 2.5)


def test_stages_are_assigned_round_robin():
    schedule = schedules.interleaved(stages=3, microbatches=3, chunks=2)
    assert (schedule.stages, schedule.devices, schedule.chunks) == (6, 3, 2)
    assert schedule.placement == ((0, 3), (1, 4), (2, 5))


def test_microbatches_come_in_groups():
    with pytest.raises(ShardingError, match=r"6 % 4 = 2[\s\S]*multiple of stages[\s\S]*microbatches=8"):
        schedules.interleaved(stages=4, microbatches=6)


@pytest.mark.parametrize("sizes", [(0, 4, 2), (2, 0, 2), (2, 4, 0)])
def test_sizes_that_cannot_be(sizes):
    stages, microbatches, chunks = sizes
    with pytest.raises(ShardingError, match="schedules.interleaved\n  found:    [a-z]+=0"):
        schedules.interleaved(stages=stages, microbatches=microbatches, chunks=chunks)
