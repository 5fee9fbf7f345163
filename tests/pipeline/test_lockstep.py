"""The tables that one program reads do what the schedule says: walked tick by tick with dicts in place of slots."""

from collections import Counter

import pytest
from hypothesis import given, settings
from pipelines import SYNCHRONOUS, made, synchronous_schedules

from sharding.pipeline import Schedule, Task, schedules
from sharding.pipeline.lockstep import OPS, THINGS, lockstep


def walked(schedule):
    """Per tick what each device does as (kind, stage, microbatch); fails where a task does not find what it needs."""
    tables = lockstep(schedule)
    ticks, devices = tables.op.shape
    last = schedule.stages - 1
    memory = [{thing: {} for thing in THINGS} for _ in range(devices)]
    rows = []
    for t in range(ticks):
        row, sent = [], []
        for device in range(devices):
            kind = OPS[tables.op[t, device]]
            stage = tables.stages[device][tables.chunk[t, device]]
            microbatch = int(tables.microbatch[t, device])
            here = memory[device]
            at = {thing: int(tables.slot[thing][t, device]) for thing in THINGS}
            goes = {}

            def find(thing, here=here, at=at, stage=stage, microbatch=microbatch):
                assert at[thing] < tables.num_slots[thing], f"{thing} is looked for where nobody leaves it"
                assert here[thing].get(at[thing]) == (stage, microbatch)

            def leave(thing, here=here, at=at, stage=stage, microbatch=microbatch):
                here[thing][at[thing]] = (stage, microbatch)

            if kind is not None:
                assert tables.is_first[t, device] == (stage == 0)
                assert tables.is_last[t, device] == (stage == last)
                row.append((kind, stage, microbatch))
            else:
                row.append(None)
            if kind == "forward":
                if stage > 0:
                    find("input")
                leave("residual")
                if stage == last:
                    leave("gradient")
                goes["input"] = (stage + 1, microbatch)
            if kind in ("backward", "backward-input"):
                find("residual")
                find("gradient")
                goes["gradient"] = (stage - 1, microbatch)
            if kind == "backward-input":
                leave("saved")
            if kind == "backward-weight":
                find("saved")
            sent.append(goes)
        for k, (thing, shift) in enumerate(tables.lanes):
            for device in range(devices):
                arrived = sent[(device - shift) % devices].get(thing, "nothing")
                memory[device][thing][int(tables.arrivals[t, device, k])] = arrived
        rows.append(tuple(row))
    return rows


def most_live(schedule):
    """The most of each thing that waits on one device after a tick: it has been made and will be needed."""
    ticks = schedule.ticks()
    last = schedule.stages - 1
    home = {(t.stage, t.microbatch): d for row in ticks for d, t in enumerate(row) if t is not None}
    made, needed = {}, {}
    for tick, row in enumerate(ticks):
        for task in filter(None, row):
            _, stage, m, *_ = task
            if task.kind == "forward":
                made["residual", stage, m] = tick
                needed["input", stage, m] = tick
                made["gradient" if stage == last else "input", min(stage + 1, last), m] = tick
            if task.kind in ("backward", "backward-input"):
                needed["residual", stage, m] = needed["gradient", stage, m] = tick
                made["gradient", stage - 1, m] = made["saved", stage, m] = tick
            if task.kind == "backward-weight":
                needed["saved", stage, m] = tick
    most = dict.fromkeys(THINGS, 0)
    for tick in range(len(ticks)):
        waits = [which for which in needed if which in made and made[which] <= tick < needed[which]]
        for (thing, _), count in Counter((thing, home[stage, m]) for thing, stage, m in waits).items():
            most[thing] = max(most[thing], count)
    return most


def names(rows):
    return [tuple(None if task is None else (task.kind, task.stage, task.microbatch) for task in row) for row in rows]


@pytest.mark.parametrize("case", SYNCHRONOUS, ids=str)
def test_every_task_finds_what_it_needs(case):
    schedule = made(*case)
    assert walked(schedule) == names(schedule.ticks())
    split = schedule.split_backward()
    assert walked(split) == names(split.ticks())


@settings(max_examples=150, deadline=None)
@given(synchronous_schedules())
def test_tasks_over_devices_by_chance_find_what_they_need(schedule):
    assert walked(schedule) == names(schedule.ticks())


@pytest.mark.parametrize("case", SYNCHRONOUS, ids=str)
def test_as_many_slots_as_things_that_wait_at_a_time(case):
    for schedule in (made(*case), made(*case).split_backward()):
        assert lockstep(schedule).num_slots == most_live(schedule)


@settings(max_examples=150, deadline=None)
@given(synchronous_schedules())
def test_as_many_slots_as_things_that_wait_by_chance(schedule):
    assert lockstep(schedule).num_slots == most_live(schedule)


def test_slots_of_1f1b_do_not_grow_with_microbatches():
    few, many = (lockstep(schedules.one_f_one_b(stages=4, microbatches=m)).num_slots for m in (8, 64))
    assert few == many
    assert few["residual"] == 4


def test_neighbours_are_the_only_ones_that_1f1b_sends_to():
    lanes = lockstep(schedules.one_f_one_b(stages=4, microbatches=8)).lanes
    assert set(lanes) == {("input", 1), ("gradient", 3)}


def test_a_device_with_fewer_stages_has_one_more_than_once():
    orders = [
        [Task("forward", 0, 0), Task("forward", 1, 0), Task("backward", 1, 0), Task("backward", 0, 0)],
        [Task("forward", 2, 0), Task("backward", 2, 0)],
    ]
    tables = lockstep(Schedule(name="mine", orders=orders, stages=3, microbatches=1))
    assert tables.stages == ((0, 1), (2, 2))
