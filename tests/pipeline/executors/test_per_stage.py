"""Programs are started in the order of the schedule, each after those that it needs."""

import pytest
from hypothesis import given, settings
from pipelines import SLICED, SYNCHRONOUS, awaited, by_name, made, synchronous_schedules

from sharding.pipeline.executors.per_stage import dispatch_order


def check(schedule):
    started, done = [[] for _ in schedule.orders], set()
    for task, device, place in dispatch_order(schedule):
        assert place == len(started[device])
        started[device].append(task)
        for kinds, *where in awaited(schedule, task):
            assert any((kind, *where) in done for kind in kinds)
        done.add((task.kind, task.stage, task.microbatch, task.slice))
    assert tuple(map(tuple, started)) == schedule.orders


@pytest.mark.parametrize(*by_name(SYNCHRONOUS + SLICED))
def test_programs_start_in_the_schedules_order(cases):
    for case in cases:
        check(made(*case))
        check(made(*case).split_backward())


@settings(max_examples=100, deadline=None)
@given(synchronous_schedules())
def test_programs_of_random_tables_start_in_their_order(schedule):
    check(schedule)
