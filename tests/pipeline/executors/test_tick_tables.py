"""The tick tables execute the schedule: interpreted tick by tick with dicts in place of slots."""

from collections import Counter

import pytest
from hypothesis import given, settings
from support.all_schedules import SLICED, SYNCHRONOUS, cases_by_schedule, make_schedule, synchronous_schedules

from sharding.pipeline import Schedule, Task, schedules
from sharding.pipeline.executors.tick_tables import BUFFERS, OPS, tick_tables


def interpreted(schedule):
    """Per tick each device's task as (kind, stage, unit); fails if a task does not find its operands."""
    tables = tick_tables(schedule)
    ticks, devices = tables.op.shape
    last = schedule.stages - 1
    memory = [{buffer: {} for buffer in BUFFERS} for _ in range(devices)]
    rows = []
    for t in range(ticks):
        row, sent = [], []
        for device in range(devices):
            kind = OPS[tables.op[t, device]]
            stage = tables.stages[device][tables.chunk[t, device]]
            unit = int(tables.unit[t, device])
            here = memory[device]
            at = {buffer: int(tables.slot[buffer][t, device]) for buffer in BUFFERS}
            at |= {f"neighbour {buffer}": int(found[t, device]) for buffer, found in tables.neighbour_slot.items()}
            part = unit % schedule.slices
            goes = {}

            def find(buffer, here=here, at=at, stage=stage, unit=unit):
                assert at[buffer] < tables.num_slots[buffer], f"{buffer} is read from a slot that nothing writes"
                assert here[buffer].get(at[buffer]) == (stage, unit)

            def leave(buffer, here=here, at=at, stage=stage, unit=unit):
                here[buffer][at[buffer]] = (stage, unit)

            def hand(buffer, to, here=here, at=at, stage=stage):
                here[buffer][at[f"neighbour {buffer}"]] = (stage, to)

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
        for k, (buffer, shift) in enumerate(tables.exchanges):
            for device in range(devices):
                arrived = sent[(device - shift) % devices].get(buffer, "nothing")
                memory[device][buffer][int(tables.arrivals[t, device, k])] = arrived
        rows.append(tuple(row))
    return rows


def most_live(schedule):
    """Per buffer the maximum number of live values on one device after a tick."""
    ticks = schedule.ticks()
    last = schedule.stages - 1
    home = {(t.stage, schedule.unit(t)): d for row in ticks for d, t in enumerate(row) if t is not None}
    make_schedule, needed = {}, {}
    for tick, row in enumerate(ticks):
        for task in filter(None, row):
            stage, m = task.stage, schedule.unit(task)
            if task.kind == "forward":
                make_schedule["residual", stage, m] = tick
                needed["input", stage, m] = tick
                if task.slice > 0:
                    needed["context", stage, m] = tick
                if task.slice < schedule.slices - 1:
                    make_schedule["context", stage, m + 1] = tick
                make_schedule["gradient" if stage == last else "input", min(stage + 1, last), m] = tick
            if task.kind in ("backward", "backward-input"):
                needed["residual", stage, m] = needed["gradient", stage, m] = tick
                make_schedule["gradient", stage - 1, m] = make_schedule["saved", stage, m] = tick
                if task.slice > 0:
                    make_schedule["context gradient", stage, m - 1] = tick
                if task.slice < schedule.slices - 1:
                    needed["context gradient", stage, m] = tick
            if task.kind == "backward-weight":
                needed["saved", stage, m] = tick
    most = dict.fromkeys(BUFFERS, 0)
    for tick in range(len(ticks)):
        waits = [which for which in needed if which in make_schedule and make_schedule[which] <= tick < needed[which]]
        for (buffer, _), count in Counter((buffer, home[stage, m]) for buffer, stage, m in waits).items():
            most[buffer] = max(most[buffer], count)
    return most


def names(schedule):
    def name(task):
        return None if task is None else (task.kind, task.stage, schedule.unit(task))

    return [tuple(map(name, row)) for row in schedule.ticks()]


@pytest.mark.parametrize(*cases_by_schedule(SYNCHRONOUS + SLICED))
def test_every_task_finds_its_operands(cases):
    for case in cases:
        for schedule in (make_schedule(*case), make_schedule(*case).split_backward()):
            assert interpreted(schedule) == names(schedule)


@settings(max_examples=150, deadline=None)
@given(synchronous_schedules())
def test_tasks_of_random_schedules_find_their_operands(schedule):
    assert interpreted(schedule) == names(schedule)


@pytest.mark.parametrize(*cases_by_schedule(SYNCHRONOUS + SLICED))
def test_slots_equal_peak_live_values(cases):
    for case in cases:
        for schedule in (make_schedule(*case), make_schedule(*case).split_backward()):
            assert tick_tables(schedule).num_slots == most_live(schedule)


@settings(max_examples=150, deadline=None)
@given(synchronous_schedules())
def test_slots_equal_peak_live_values_of_random_schedules(schedule):
    assert tick_tables(schedule).num_slots == most_live(schedule)


def test_slots_of_1f1b_do_not_grow_with_microbatches():
    few, many = (tick_tables(schedules.one_f_one_b(stages=4, microbatches=m)).num_slots for m in (8, 64))
    assert few == many
    assert few["residual"] == 4


def test_1f1b_exchanges_with_neighbours_only():
    exchanges = tick_tables(schedules.one_f_one_b(stages=4, microbatches=8)).exchanges
    assert set(exchanges) == {("input", 1), ("gradient", 3)}


def test_a_device_with_fewer_stages_repeats_one():
    orders = [
        [Task("forward", 0, 0), Task("forward", 1, 0), Task("backward", 1, 0), Task("backward", 0, 0)],
        [Task("forward", 2, 0), Task("backward", 2, 0)],
    ]
    tables = tick_tables(Schedule(name="mine", orders=orders, stages=3, microbatches=1))
    assert tables.stages == ((0, 1), (2, 2))
