"""Chimera against its closed forms; doubling also with both forwards of a slot as one task."""

import pytest

from sharding.errors import ShardingError
from sharding.pipeline import schedules

UNITS = [(stages, units) for stages in (2, 4, 6, 8) for units in (1, 2, 3, 4)]


@pytest.mark.parametrize(("stages", "units"), UNITS)
def test_equal_times(stages, units):
    """With F = B only D - 2 slots are idle for any number of units."""
    microbatches = stages * units
    simulation = schedules.chimera(stages=stages, microbatches=microbatches).simulate(forward=1.0, backward=1.0)
    assert simulation.makespan == 2 * microbatches + stages - 2
    assert simulation.bubble_fraction == pytest.approx((stages - 2) / (2 * microbatches + stages - 2))
    assert (
        simulation.makespan <= schedules.gpipe(stages=stages, microbatches=microbatches).simulate(backward=1.0).makespan
    )


@pytest.mark.parametrize(("stages", "units"), UNITS)
def test_backwards_twice_as_long(stages, units):
    """One unit has an idle time of 2 (D - 2); each further one adds intermediate bubbles, which doubling removes."""
    microbatches = stages * units
    simulation = schedules.chimera(stages=stages, microbatches=microbatches).simulate(forward=1.0, backward=2.0)
    assert simulation.makespan == 3 * microbatches + (units + 1) * (stages - 2)
    if units == 1:
        assert simulation.bubble_fraction == pytest.approx((stages - 2) / (1.5 * microbatches + stages - 2))
    if units % 2 == 0:
        doubled = schedules.chimera(stages=stages, microbatches=microbatches, concatenation="doubling")
        assert doubled.simulate(forward=1.0, backward=2.0).makespan == 3 * microbatches + 1.5 * (stages - 2)


@pytest.mark.parametrize(("stages", "units"), UNITS)
def test_activations(stages, units):
    """D/2 + 1 on the outer devices to D on the inner ones; twice as many with doubling."""
    half = [stages // 2 + 1 + device for device in range(stages // 2)]
    expected = (*half, *reversed(half))
    direct = schedules.chimera(stages=stages, microbatches=stages * units)
    assert direct.simulate().peak_activations == expected
    doubled = schedules.chimera(stages=stages, microbatches=2 * stages * units, concatenation="doubling")
    assert doubled.simulate().peak_activations == tuple(2 * count for count in expected)


@pytest.mark.parametrize(
    ("stages", "microbatches", "backward", "makespan", "idle"),
    [(4, 4, 1.0, 10, 2), (4, 4, 2.0, 16, 4), (4, 8, 1.0, 18, 2), (4, 8, 2.0, 30, 6), (6, 6, 1.0, 16, 4)],
)
def test_published_instances(stages, microbatches, backward, makespan, idle):
    simulation = schedules.chimera(stages=stages, microbatches=microbatches).simulate(forward=1.0, backward=backward)
    assert simulation.makespan == makespan
    assert simulation.idle == (idle,) * stages


def in_pairs(schedule, forward, backward):
    """The makespan if both forwards of a slot form one task."""
    ends, free = {}, [0] * schedule.devices
    places = [0] * schedule.devices
    while any(place < len(order) for place, order in zip(places, schedule.orders, strict=True)):
        for device, order in enumerate(schedule.orders):
            if places[device] == len(order):
                continue
            task = order[places[device]]
            pair = task.microbatch // 2
            if task.kind == "forward":
                needs = [("F", task.stage - 1, pair)] if task.stage else []
                made, taken, count = ("F", task.stage, pair), 2 * forward, 2
                assert order[places[device] + 1] == task._replace(microbatch=task.microbatch + 1)
            else:
                needs = [("F", task.stage, pair)]
                needs += [("B", task.stage + 1, task.microbatch)] if task.stage < schedule.stages - 1 else []
                made, taken, count = ("B", task.stage, task.microbatch), backward, 1
            if all(one in ends for one in needs):
                free[device] = max([free[device], *(ends[one] for one in needs)]) + taken
                ends[made] = free[device]
                places[device] += count
    return max(free)


@pytest.mark.parametrize(("stages", "units"), UNITS)
def test_doubling_with_forwards_of_twice_the_size(stages, units):
    """The paper's doubling: an idle time of 2 (D - 2); a makespan of 28 for 4 stages and 8 microbatches, against 30."""
    microbatches = 2 * stages * units
    schedule = schedules.chimera(stages=stages, microbatches=microbatches, concatenation="doubling")
    assert in_pairs(schedule, 1, 2) == 3 * microbatches + 2 * (stages - 2)
    if (stages, units) == (4, 1):
        assert in_pairs(schedule, 1, 2) == 28
        assert max(schedule.simulate().peak_activations) == 2 * stages


def test_two_replicas_of_every_stage():
    schedule = schedules.chimera(stages=4, microbatches=4)
    assert schedule.placement == ((0, 3), (1, 2), (1, 2), (0, 3))
    assert {task.microbatch for task in schedule.orders[0] if task.stage == 0} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stages": 3, "microbatches": 6}, r"3, which is odd[\s\S]*stages=4"),
        ({"stages": 4, "microbatches": 6}, r"6 % 4 = 2[\s\S]*multiple of 4[\s\S]*microbatches=8"),
        ({"stages": 4, "microbatches": 12, "concatenation": "doubling"}, r"12 % 8 = 4[\s\S]*microbatches=16"),
        (
            {"stages": 4, "microbatches": 8, "concatenation": "halving"},
            "'halving'\n  required: 'direct' or 'doubling'",
        ),
        ({"stages": 0, "microbatches": 8}, "stages=0"),
    ],
)
def test_sizes_that_cannot_be(arguments, words):
    with pytest.raises(ShardingError, match=words):
        schedules.chimera(**arguments)
