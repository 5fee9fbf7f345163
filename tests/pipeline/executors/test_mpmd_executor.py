"""Programs are dispatched in the schedule's order, each after its dependencies."""

import pytest
from hypothesis import given, settings
from support.all_schedules import (
    SLICED,
    SYNCHRONOUS,
    cases_by_schedule,
    make_schedule,
    predecessors,
    synchronous_schedules,
)

from sharding.pipeline.executors.mpmd_executor import dispatch_order


def check(schedule):
    started, done = [[] for _ in schedule.orders], set()
    for task, device, place in dispatch_order(schedule):
        assert place == len(started[device])
        started[device].append(task)
        for kinds, *where in predecessors(schedule, task):
            assert any((kind, *where) in done for kind in kinds)
        done.add((task.kind, task.stage, task.microbatch, task.slice))
    assert tuple(map(tuple, started)) == schedule.orders


@pytest.mark.parametrize(*cases_by_schedule(SYNCHRONOUS + SLICED))
def test_programs_start_in_the_schedules_order(cases):
    for case in cases:
        check(make_schedule(*case))
        check(make_schedule(*case).split_backward())


@settings(max_examples=100, deadline=None)
@given(synchronous_schedules())
def test_programs_of_random_tables_start_in_their_order(schedule):
    check(schedule)
