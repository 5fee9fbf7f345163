"""PipeDream, 2BW and HetPipe: staleness and weight versions against formulas and an emulation of workers."""

import random

import pytest

from sharding.errors import ShardingError
from sharding.pipeline import schedules

STAGES = [1, 2, 3, 4, 6]


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("microbatches", [1, 3, 8, 20])
def test_pipedream(stages, microbatches):
    """Stage s of n has a staleness of n - 1 - s and stashes n - s versions, given enough microbatches."""
    simulation = schedules.pipedream(stages=stages, microbatches=microbatches).simulate()
    assert simulation.staleness == tuple(min(stages - 1 - s, microbatches - 1) for s in range(stages))
    if microbatches >= 2 * stages:
        assert simulation.weight_versions == tuple(stages - s for s in range(stages))


def test_pipedream_of_four_stages():
    simulation = schedules.pipedream(stages=4, microbatches=12).simulate()
    assert simulation.staleness == (3, 2, 1, 0)
    assert simulation.weight_versions == (4, 3, 2, 1)


@pytest.mark.parametrize("stages", STAGES)
def test_pipedream_uses_the_newest_available_weights(stages):
    """In the steady state a version newer by one would deadlock."""
    schedule = schedules.pipedream(stages=stages, microbatches=3 * stages)
    for order in schedule.orders:
        updates = 0
        for task in order:
            if task.kind == "forward":
                assert task.version == max(0, updates) or task.microbatch < stages
                assert task.version <= updates
            updates += task.kind == "backward"


@pytest.mark.parametrize("stages", STAGES)
def test_vertical_sync(stages):
    """All stages use the first stage's version: staleness n - 1, with n versions stashed."""
    schedule = schedules.pipedream(stages=stages, microbatches=3 * stages, vertical_sync=True)
    assert schedule.simulate().staleness == (stages - 1,) * stages
    assert schedule.simulate().weight_versions == (stages,) * stages
    for microbatch in range(3 * stages):
        found = {task.version for order in schedule.orders for task in order if task.microbatch == microbatch}
        assert found == {max(0, microbatch - stages + 1)}


@pytest.mark.parametrize("stages", STAGES)
def test_no_bubbles_without_a_flush(stages):
    """Devices are busy from the first backward on, so the bubble fraction tends to zero."""
    fractions = [
        schedules.pipedream(stages=stages, microbatches=count).simulate().bubble_fraction for count in (8, 80, 400)
    ]
    assert fractions == pytest.approx([(stages - 1) / (count + stages - 1) for count in (8, 80, 400)])
    assert fractions[-1] < 0.02


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_two_buffers(stages, factor):
    """Batch t uses version t - 1 at all stages; two versions are enough."""
    accumulate = factor * stages
    schedule = schedules.pipedream_2bw(stages=stages, microbatches=4 * accumulate, accumulate=accumulate)
    simulation = schedule.simulate()
    assert all(task.version == max(0, task.microbatch // accumulate - 1) for order in schedule.orders for task in order)
    assert simulation.weight_versions == (2,) * stages
    assert simulation.staleness == (1,) * stages
    assert schedule.orders[0][0].version == 0


@pytest.mark.parametrize("accumulate", [4, 8])
def test_two_buffers_of_four_stages(accumulate):
    simulation = schedules.pipedream_2bw(stages=4, microbatches=24, accumulate=accumulate).simulate()
    assert max(simulation.weight_versions) == 2


def test_fewer_microbatches_than_stages_need_a_third_buffer():
    with pytest.raises(ShardingError, match=r"accumulate=2, stages=4[\s\S]*third version[\s\S]*accumulate=4"):
        schedules.pipedream_2bw(stages=4, microbatches=8, accumulate=2)


BOUNDS = {(1, 0): 0, (1, 1): 1, (1, 4): 4, (2, 0): 2, (2, 1): 4, (2, 4): 10, (4, 0): 6, (4, 1): 10}


def bound(concurrent, distance):
    local = concurrent - 1
    return (distance + 1) * (local + 1) + local - 1


@pytest.mark.parametrize("concurrent", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("distance", [0, 1, 4])
def test_staleness_of_wave_synchronous_workers(concurrent, distance):
    schedule = schedules.hetpipe(stages=4, microbatches=40, concurrent=concurrent, clock_distance=distance)
    schedule.check()
    missed = BOUNDS.get((concurrent, distance), bound(concurrent, distance))
    assert bound(concurrent, distance) == missed
    assert schedule.simulate().staleness == (missed,) * 4


@pytest.mark.parametrize("stages", STAGES)
def test_the_last_stage_of_any_number_of_minibatches_keeps_one(stages):
    """Its backward follows its forward at once; minibatches in flight wait at earlier stages."""
    for concurrent in range(1, 2 * stages):
        schedule = schedules.hetpipe(stages=stages, microbatches=20, concurrent=concurrent)
        assert [task.kind for task in schedule.orders[-1]] == ["forward", "backward"] * 20


@pytest.mark.parametrize("concurrent", [1, 2, 4])
@pytest.mark.parametrize("distance", [0, 1, 2])
def test_versions_are_guaranteed(concurrent, distance):
    """Workers of random speeds lack at most what their table guarantees, and some attain the bound."""
    microbatches, most = 24, 0
    schedule = schedules.hetpipe(
        stages=1 + concurrent // 2, microbatches=microbatches, concurrent=concurrent, clock_distance=distance
    )
    promised = {task.microbatch: task.version for task in schedule.orders[0]}
    for seed in range(200):
        for microbatch, pulled in raced(concurrent, distance, microbatches, random.Random(seed)):
            assert pulled >= promised[microbatch]
            most = max(most, microbatch - pulled)
    assert most == bound(concurrent, distance)


def raced(concurrent, distance, microbatches, chance):
    """(minibatch, the other's minibatches in its weights) at each admission of the first of two workers.

    A worker admits minibatch p once p - concurrent is done, and pushes complete waves. Its weights must include all
    waves but the last ``distance`` before its own clock; otherwise it pulls the other's pushes, or waits for them.
    """
    begun, done, pulled_waves = [0, 0], [0, 0], [0, 0]
    speeds = [chance.random(), chance.random()]
    while done[0] < microbatches:
        worker = chance.choices((0, 1), weights=speeds)[0]
        if begun[worker] < done[worker] + concurrent and chance.random() < 0.7:
            needed = done[worker] // concurrent - distance
            pushed = done[1 - worker] // concurrent
            if pulled_waves[worker] < needed:
                if pushed < needed:
                    continue
                pulled_waves[worker] = pushed
            if worker == 0 and begun[0] < microbatches:
                yield begun[0], pulled_waves[0] * concurrent
            begun[worker] += 1
        elif done[worker] < begun[worker]:
            done[worker] += 1


@pytest.mark.parametrize("concurrent", [1, 2, 3, 4, 6, 7])
def test_one_worker(concurrent):
    """The staleness is that of the minibatches in flight; the first stage stashes the most activations."""
    simulation = schedules.hetpipe(stages=4, microbatches=24, concurrent=concurrent).simulate()
    assert simulation.staleness == (concurrent - 1,) * 4
    assert simulation.peak_activations[0] == concurrent
    assert list(simulation.peak_activations) == sorted(simulation.peak_activations, reverse=True)


def test_one_minibatch_at_a_time_is_serial():
    simulation = schedules.hetpipe(stages=3, microbatches=5, concurrent=1).simulate(forward=1.0, backward=2.0)
    assert simulation.makespan == 5 * 3 * (1 + 2)
    assert simulation.staleness == (0, 0, 0)
    assert simulation.weight_versions == (1, 1, 1)


@pytest.mark.parametrize("stages", [2, 4, 5])
def test_as_many_minibatches_as_stages_fill_the_pipeline(stages):
    """As fast as PipeDream on even stages, and no slower with more minibatches in flight."""
    expected = schedules.pipedream(stages=stages, microbatches=24).simulate().makespan
    for concurrent in range(stages, 2 * stages):
        schedule = schedules.hetpipe(stages=stages, microbatches=24, concurrent=concurrent)
        assert schedule.simulate().makespan == expected


def test_more_minibatches_at_a_time_are_faster():
    spans = [
        schedules.hetpipe(stages=4, microbatches=24, concurrent=count).simulate(
            forward=[1, 2, 1, 2], backward=[2, 4, 2, 4]
        )
        for count in (1, 2, 4)
    ]
    assert spans[0].makespan > spans[1].makespan > spans[2].makespan


@pytest.mark.parametrize(
    ("schedule", "arguments", "words"),
    [
        (schedules.pipedream, {"stages": 0}, "stages=0"),
        (schedules.pipedream_2bw, {"stages": 4, "accumulate": 0}, "accumulate=0"),
        (schedules.pipedream_2bw, {"stages": 4, "accumulate": 5}, r"8 % 5 = 3[\s\S]*microbatches=10"),
        (schedules.hetpipe, {"stages": 4, "concurrent": 0}, "concurrent=0"),
        (schedules.hetpipe, {"stages": 4, "concurrent": 8}, r"at most 2 stages - 1 = 7[\s\S]*concurrent=7"),
        (schedules.hetpipe, {"stages": 4, "clock_distance": -1}, r"-1[\s\S]*non-negative integer"),
    ],
)
def test_sizes_that_cannot_be(schedule, arguments, words):
    with pytest.raises(ShardingError, match=words):
        schedule(microbatches=8, **arguments)
