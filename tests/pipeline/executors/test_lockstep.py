"""The tables that one program reads do what the schedule says: walked tick by tick with dicts in place of slots."""

from collections import Counter

import pytest
from hypothesis import given, settings
from pipelines import SLICED, SYNCHRONOUS, by_name, made, synchronous_schedules

from sharding.pipeline import Schedule, Task, schedules
from sharding.pipeline.executors.lockstep import OPS, THINGS, lockstep


def walked(schedule):
    """Per tick what each device does as (kind, stage, unit); fails where a task does not find what it needs."""
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
            unit = int(tables.unit[t, device])
            here = memory[device]
            at = {thing: int(tables.slot[thing][t, device]) for thing in THINGS}
            at |= {f"passed {thing}": int(found[t, device]) for thing, found in tables.passed.items()}
            part = unit % schedule.slices
            goes = {}

            def find(thing, here=here, at=at, stage=stage, unit=unit):
                assert at[thing] < tables.num_slots[thing], f"{thing} is looked for where nobody leaves it"
                assert here[thing].get(at[thing]) == (stage, unit)

            def leave(thing, here=here, at=at, stage=stage, unit=unit):
                here[thing][at[thing]] = (stage, unit)

            def hand(thing, to, here=here, at=at, stage=stage):
                here[thing][at[f"passed {thing}"]] = (stage, to)

            if kind is not None:
                assert tables.is_first[t, device] == (stage == 0)
                assert tables.is_last[t, device] == (stage == last)
                assert tables.is_first_slice[t, device] == (part == 0)
                assert tables.is_last_slice[t, device] == (part == schedule.slices - 1)
                row.append((kind, stage, unit))
            else:
                row.append(None)
            if kind == "forward":
                if stage > 0:
                    find("input")
                if part > 0:
                    find("context")
                leave("residual")
                hand("context", unit + 1)
                if stage == last:
                    leave("gradient")
                goes["input"] = (stage + 1, unit)
            if kind in ("backward", "backward-input"):
                find("residual")
                find("gradient")
                if part < schedule.slices - 1:
                    find("context gradient")
                hand("context gradient", unit - 1)
                goes["gradient"] = (stage - 1, unit)
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
    home = {(t.stage, schedule.unit(t)): d for row in ticks for d, t in enumerate(row) if t is not None}
    made, needed = {}, {}
    for tick, row in enumerate(ticks):
        for task in filter(None, row):
            stage, m = task.stage, schedule.unit(task)
            if task.kind == "forward":
                made["residual", stage, m] = tick
                needed["input", stage, m] = tick
                if task.slice > 0:
                    needed["context", stage, m] = tick
                if task.slice < schedule.slices - 1:
                    made["context", stage, m + 1] = tick
                made["gradient" if stage == last else "input", min(stage + 1, last), m] = tick
            if task.kind in ("backward", "backward-input"):
                needed["residual", stage, m] = needed["gradient", stage, m] = tick
                made["gradient", stage - 1, m] = made["saved", stage, m] = tick
                if task.slice > 0:
                    made["context gradient", stage, m - 1] = tick
                if task.slice < schedule.slices - 1:
                    needed["context gradient", stage, m] = tick
            if task.kind == "backward-weight":
                needed["saved", stage, m] = tick
    most = dict.fromkeys(THINGS, 0)
    for tick in range(len(ticks)):
        waits = [which for which in needed if which in made and made[which] <= tick < needed[which]]
        for (thing, _), count in Counter((thing, home[stage, m]) for thing, stage, m in waits).items():
            most[thing] = max(most[thing], count)
    return most


def names(schedule):
    def name(task):
        return None if task is None else (task.kind, task.stage, schedule.unit(task))

    return [tuple(map(name, row)) for row in schedule.ticks()]


@pytest.mark.parametrize(*by_name(SYNCHRONOUS + SLICED))
def test_every_task_finds_what_it_needs(cases):
    for case in cases:
        for schedule in (made(*case), made(*case).split_backward()):
            assert walked(schedule) == names(schedule)


@settings(max_examples=150, deadline=None)
@given(synchronous_schedules())
def test_tasks_over_devices_by_chance_find_what_they_need(schedule):
    assert walked(schedule) == names(schedule)


@pytest.mark.parametrize(*by_name(SYNCHRONOUS + SLICED))
def test_as_many_slots_as_things_that_wait_at_a_time(cases):
    for case in cases:
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
