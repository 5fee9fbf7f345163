"""Times, ticks and peaks of published and random schedules against a tick-by-tick simulation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.all_schedules import (
    GRID,
    cases_by_schedule,
    make_schedule,
    peak_activations,
    peak_weight_versions,
    random_schedules,
    simulate_by_clock,
    simulate_in_lockstep,
)

from sharding.errors import ShardingError
from sharding.pipeline import schedules

SMALL = [(name, stages, microbatches) for name, stages, microbatches in GRID if stages * microbatches <= 16]


def integer_times(schedule, kinds):
    """Integer times of this schedule's tasks, by kind."""
    return lambda task: kinds[task.kind]


def simulated(schedule, kinds, **options):
    """The simulation with these times per kind."""
    backward = kinds["backward-input"] + kinds["backward-weight"]
    return schedule.simulate(
        forward=lambda task: kinds["forward"],
        backward=lambda task: kinds["backward"] if task.kind == "backward" else backward,
        weight=lambda task: 0 if task.kind == "backward" else kinds["backward-weight"],
        **options,
    )


KINDS = st.fixed_dictionaries(
    {kind: st.integers(1, 4) for kind in ("forward", "backward", "backward-input", "backward-weight")}
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SMALL), KINDS, st.integers(0, 3))
def test_times_of_published_schedules(case, kinds, send):
    schedule = make_schedule(*case)
    simulation = simulated(schedule, kinds, send=send)
    assert simulation.starts == simulate_by_clock(schedule, integer_times(schedule, kinds), send)
    assert simulation.makespan == max(max(ends) for ends in simulation.ends)


@settings(max_examples=150, deadline=None)
@given(random_schedules(), KINDS, st.integers(0, 3))
def test_times_of_random_schedules(schedule, kinds, send):
    schedule.check()
    simulation = simulated(schedule, kinds, send=send)
    assert simulation.starts == simulate_by_clock(schedule, integer_times(schedule, kinds), send)
    assert schedule.ticks() == simulate_in_lockstep(schedule)
    assert list(simulation.peak_activations) == pytest.approx(peak_activations(schedule, simulation))
    assert list(simulation.weight_versions) == peak_weight_versions(schedule)


@pytest.mark.parametrize(*cases_by_schedule(GRID))
def test_ticks(cases):
    for case in cases:
        assert make_schedule(*case).ticks() == simulate_in_lockstep(make_schedule(*case))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(SMALL), KINDS, st.integers(0, 3))
def test_lockstep_times(case, kinds, send):
    """A tick takes as long as its longest task plus one transfer."""
    schedule = make_schedule(*case)
    rows = simulate_in_lockstep(schedule)
    lengths = [max(kinds[task.kind] for task in row if task) + send for row in rows]
    simulation = simulated(schedule, kinds, send=send, lockstep=True)
    for device, order in enumerate(schedule.orders):
        ticks = [next(tick for tick, row in enumerate(rows) if row[device] == task) for task in order]
        assert simulation.starts[device] == tuple(sum(lengths[:tick]) for tick in ticks)
    assert simulation.makespan <= sum(lengths)


@pytest.mark.parametrize(*cases_by_schedule(SMALL))
def test_peak_activations(cases):
    for case in cases:
        schedule = make_schedule(*case)
        simulation = simulated(schedule, dict.fromkeys(("forward", "backward", "backward-input", "backward-weight"), 1))
        assert list(simulation.peak_activations) == pytest.approx(peak_activations(schedule, simulation))


@pytest.mark.parametrize(*cases_by_schedule(GRID))
def test_devices_are_busy_idle_or_between(cases):
    """The devices' total busy time does not depend on the order."""
    for case in cases:
        check_times_of_devices(make_schedule(*case))


def check_times_of_devices(schedule):
    simulation = schedule.simulate(forward=1.0, backward=2.0)
    devices = schedule.devices
    assert sum(simulation.busy) == pytest.approx(3.0 * schedule.microbatches * devices)
    for busy, idle, gap in zip(simulation.busy, simulation.idle, simulation.gaps, strict=True):
        assert busy + idle == pytest.approx(simulation.makespan)
        assert -1e-9 <= gap <= idle + 1e-9
    assert simulation.bubble_fraction == pytest.approx(sum(simulation.idle) / devices / simulation.makespan)


def test_a_slow_tick_delays_all_devices():
    """In lockstep one backward makes a tick long for all devices: 1F1B's utilisation falls from 0.842 to 0.667."""
    parts = {"forward": 1.0, "backward": 2.0, "lockstep": True}
    for schedule, ticks, busy in [
        (schedules.gpipe, 38, 0.842),
        (schedules.one_f_one_b, 38, 0.667),
        (schedules.interleaved, 70, 0.727),
        (schedules.zb_h1, 51, 0.941),
    ]:
        table = schedule(stages=4, microbatches=16)
        assert len(table.ticks()) == ticks
        assert 1 - table.simulate(**parts).bubble_fraction == pytest.approx(busy, abs=5e-4)


@pytest.mark.parametrize(*cases_by_schedule(GRID))
def test_split_backwards(cases):
    """At most the makespan before: the previous stage waits only for backward-input."""
    for case in cases:
        check_split(make_schedule(*case))


def check_split(unsplit):
    parts = unsplit.split_backward()
    parts.check()
    assert not any(one.task.kind == "backward" for one in parts.located())
    before, after = unsplit.simulate(), parts.simulate()
    assert after.busy == pytest.approx(before.busy)
    assert after.makespan <= before.makespan + 1e-9
    assert after.peak_activations == before.peak_activations
    assert parts.split_backward() == parts


def test_split_backwards_in_lockstep():
    schedule = schedules.one_f_one_b(stages=4, microbatches=16)
    unsplit, parts = (each.simulate(lockstep=True) for each in (schedule, schedule.split_backward()))
    assert parts.makespan < unsplit.makespan
    assert parts.bubble_fraction < 1 / 6 < unsplit.bubble_fraction


def test_times_per_stage_and_by_task():
    schedule = schedules.gpipe(stages=3, microbatches=2)
    by_stage = schedule.simulate(forward=[1, 2, 3], backward=(2, 4, 6))
    by_task = schedule.simulate(forward=lambda t: t.stage + 1.0, backward=lambda t: 2.0 * (t.stage + 1))
    assert by_stage == by_task
    assert by_stage.busy == (6, 12, 18)


def test_a_chunk_and_a_slice_take_their_share():
    chunked = schedules.interleaved(stages=2, microbatches=2, chunks=4).simulate(forward=1.0, backward=2.0)
    sliced = schedules.terapipe(stages=2, microbatches=2, slices=4).simulate(forward=1.0, backward=2.0)
    assert {end - start for starts, ends in zip(chunked.starts, chunked.ends, strict=True)
            for start, end in zip(starts, ends, strict=True)} == {0.25, 0.5}  # fmt: skip
    assert sliced.ends[0][0] - sliced.starts[0][0] == 0.25
    per_stage = schedules.interleaved(stages=2, microbatches=2, chunks=2).simulate(forward=[1, 2, 3, 4], backward=8)
    assert per_stage.busy[0] == 2 * (1 + 3) + 2 * 8


def test_a_split_backward_takes_as_long_as_a_full_one():
    schedule = schedules.zb_h1(stages=2, microbatches=3)
    for weight in (None, 0.0, 0.5, 2.0):
        assert schedule.simulate(forward=1.0, backward=2.0, weight=weight).busy == (9.0, 9.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forward": -1.0}, r"simulate\(forward\)[\s\S]*-1.0[\s\S]*finite non-negative time"),
        ({"backward": float("nan")}, r"simulate\(backward\)[\s\S]*nan"),
        ({"forward": None}, r"simulate\(forward\)[\s\S]*None[\s\S]*finite non-negative time"),
        ({"forward": [1.0]}, r"1 times for 2 stages[\s\S]*one time per stage"),
        ({"backward": [1.0, -2.0]}, r"simulate\(backward\[1\]\)[\s\S]*-2.0"),
        ({"forward": lambda task: -task.stage - 1.0}, r"forward\(forward of microbatch 0 at stage 0\)[\s\S]*-1.0"),
        ({"weight": 3.0}, r"weight 3 and backward 2 of backward of microbatch 0[\s\S]*weight at most backward"),
        ({"send": float("inf")}, r"simulate\(send\)[\s\S]*inf"),
    ],
)
def test_bad_times(options, words):
    with pytest.raises(ShardingError, match=words):
        schedules.one_f_one_b(stages=2, microbatches=2).simulate(**options)
