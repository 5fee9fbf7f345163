"""Validation against mutated schedules, and against a tick-by-tick simulation for deadlocks."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.all_schedules import GRID, cases_by_schedule, make_schedule, random_schedules, simulate_by_clock

from sharding.errors import ShardingError
from sharding.pipeline import KINDS, Schedule, Task, schedules


@pytest.mark.parametrize(*cases_by_schedule(GRID))
def test_published_schedules_are_valid(cases):
    for case in cases:
        assert make_schedule(*case).check() is None


def changed(schedule, orders):
    return dataclasses.replace(schedule, orders=orders)


def refusal(schedule):
    with pytest.raises(ShardingError, match="schedule") as caught:
        schedule.check()
    return str(caught.value)


MANY = [case for case in GRID if case[1] > 1 and case[1] * case[2] <= 24]
CASES = st.sampled_from(MANY).map(lambda case: make_schedule(*case))


@st.composite
def picked(draw):
    """A schedule, and the device and position of one of its tasks."""
    schedule = draw(CASES)
    device = draw(st.integers(0, schedule.devices - 1))
    return schedule, device, draw(st.integers(0, len(schedule.orders[device]) - 1))


@settings(max_examples=100, deadline=None)
@given(picked())
def test_a_missing_task(case):
    schedule, device, place = case
    orders = [list(order) for order in schedule.orders]
    task = orders[device].pop(place)
    message = refusal(changed(schedule, orders))
    kind = "backward-weight" if task.kind == "backward-weight" else task.kind
    assert f"{kind} of microbatch {task.microbatch}" in message
    assert f"at stage {task.stage}" in message
    assert "on no device" in message


@settings(max_examples=100, deadline=None)
@given(picked(), st.randoms(use_true_random=False))
def test_a_repeated_task(case, chance):
    schedule, device, place = case
    orders = [list(order) for order in schedule.orders]
    task = orders[device][place]
    other = chance.randrange(schedule.devices)
    orders[other].insert(chance.randint(0, len(orders[other])), task)
    message = refusal(changed(schedule, orders))
    assert str(task) in message
    assert "2 times: device" in message
    where = [f"device {d}, position {i}" for d, order in enumerate(orders) for i, t in enumerate(order) if t == task]
    assert all(one in message for one in where)


@settings(max_examples=100, deadline=None)
@given(picked(), st.randoms(use_true_random=False))
def test_a_task_on_another_device(case, chance):
    schedule, device, place = case
    orders = [list(order) for order in schedule.orders]
    task = orders[device].pop(place)
    other = chance.choice([d for d in range(schedule.devices) if d != device])
    to = chance.randint(0, len(orders[other]))
    orders[other].insert(to, task)
    message = refusal(changed(schedule, orders))
    assert f"microbatch {task.microbatch} at stage {task.stage}" in message
    assert f"{task} (device {other}, position {to})" in message
    assert "all tasks of a microbatch at a stage on one device" in message


@settings(max_examples=100, deadline=None)
@given(picked(), st.integers(-2, 3))
def test_a_task_with_another_version(case, version):
    schedule, device, place = case
    orders = [list(order) for order in schedule.orders]
    task = orders[device][place]
    orders[device][place] = task._replace(version=version)
    if version == task.version:
        return
    message = refusal(changed(schedule, orders))
    assert f"microbatch {task.microbatch}" in message
    assert f"device {device}, position {place}" in message
    assert f"version {version}" in message


@settings(max_examples=200, deadline=None)
@given(CASES, st.randoms(use_true_random=False))
def test_swapped_tasks(schedule, chance):
    """An error exactly where the simulation stalls, naming the waiting tasks with their positions."""
    orders = [list(order) for order in schedule.orders]
    order = orders[chance.randrange(len(orders))]
    first, second = chance.choices(range(len(order)), k=2)
    order[first], order[second] = order[second], order[first]
    judge(changed(schedule, orders))


@settings(max_examples=100, deadline=None)
@given(random_schedules(), st.randoms(use_true_random=False))
def test_random_orders(schedule, chance):
    orders = [list(order) for order in schedule.orders]
    order = orders[chance.randrange(len(orders))]
    first, second = chance.choices(range(len(order)), k=2)
    order[first], order[second] = order[second], order[first]
    judge(changed(schedule, orders))


def judge(schedule):
    if simulate_by_clock(schedule, lambda task: 1) is not None:
        schedule.check()
        return
    message = refusal(schedule)
    assert "deadlock" in message
    places = {
        f"{task} (device {device}, position {position})"
        for device, order in enumerate(schedule.orders)
        for position, task in enumerate(order)
    }
    waits = [line for line in message.splitlines() if " waits for " in line]
    assert waits
    for line in waits:
        waiting, awaited = line.replace("  found:    ", "").strip().split(" waits for ")
        assert waiting in places
        assert awaited.split(", the last task of")[0] in places


def test_a_deadlock_lists_waiting_tasks():
    orders = [
        [Task("forward", 0, 0), Task("backward", 0, 0), Task("forward", 0, 1), Task("backward", 0, 1)],
        [Task("forward", 1, 1), Task("forward", 1, 0), Task("backward", 1, 0), Task("backward", 1, 1)],
    ]
    assert refusal(Schedule(name="mine", orders=orders, stages=2, microbatches=2)).splitlines()[:3] == [
        "schedule 'mine': deadlock",
        "  found:    backward of microbatch 0 at stage 0 (device 0, position 1)"
        " waits for backward of microbatch 0 at stage 1 (device 1, position 2)",
        "            forward of microbatch 1 at stage 1 (device 1, position 0)"
        " waits for forward of microbatch 1 at stage 0 (device 0, position 2)",
    ]


def test_a_version_that_is_not_ready():
    """The last stage of PipeDream uses the newest possible weights; one version newer deadlocks."""
    schedule = schedules.pipedream(stages=2, microbatches=3)
    newer = [task._replace(version=task.version + (task.microbatch == 1)) for task in schedule.orders[1]]
    message = refusal(changed(schedule, [schedule.orders[0], newer]))
    assert "forward of microbatch 1 at stage 1 (device 1, position 2) waits for" in message
    assert "backward of microbatch 1 at stage 1 (device 1, position 3), the last task of weight version 2" in message


def test_older_weights_may_be_used():
    schedule = schedules.pipedream(stages=2, microbatches=3)
    stale = changed(schedule, [[task._replace(version=0) for task in order] for order in schedule.orders])
    stale.check()
    assert stale.simulate().staleness == (2, 2)


def test_updates_completed_out_of_order():
    """A version includes all earlier updates: one completed out of order waits for those before it."""
    forwards = [Task("forward", 0, m, version=2 * (m == 2)) for m in range(3)]
    backwards = [Task("backward", 0, m, version=2 * (m == 2)) for m in range(3)]
    order = [forwards[0], forwards[1], backwards[1], forwards[2], backwards[0], backwards[2]]
    fields = {"name": "mine", "stages": 1, "microbatches": 3, "microbatches_per_update": 1}
    assert "the last task of weight version 2" in refusal(Schedule(orders=[order], **fields))
    order = [forwards[0], forwards[1], backwards[1], backwards[0], forwards[2], backwards[2]]
    Schedule(orders=[order], **fields).check()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task("forward", 2, 0), "stage 2, not in 0..1"),
        (Task("forward", 0, -1), "microbatch -1, not in 0..1"),
        (Task("forward", 0, 0, 1), "slice 1, not in 0..0"),
        (Task("forward", 0, 0, 0, 2), "version 2, not in 0..1"),
        (Task("forward", 0, 0.5), "microbatch 0.5, not in 0..1"),
        (Task("sideways", 0, 0), "kind 'sideways', not one of forward, backward, backward-input, backward-weight"),
    ],
)
def test_tasks_out_of_range(task, words):
    schedule = schedules.one_f_one_b(stages=2, microbatches=2)
    message = refusal(changed(schedule, [[task, *schedule.orders[0]], schedule.orders[1]]))
    assert words in message
    assert "device 0, position 0" in message


def test_a_backward_is_full_or_split():
    order = [Task(kind, 0, 0) for kind in KINDS]
    message = refusal(Schedule(name="mine", orders=[order], stages=1, microbatches=1))
    assert "either a full backward or its two parts" in message
    halves = [Task("forward", 0, 0), Task("backward-input", 0, 0)]
    message = refusal(Schedule(name="mine", orders=[halves], stages=1, microbatches=1))
    assert message.splitlines()[0] == "schedule 'mine': backward-weight of microbatch 0 at stage 0"


def test_failures_of_one_kind_come_together():
    schedule = schedules.gpipe(stages=2, microbatches=3)
    message = refusal(changed(schedule, [schedule.orders[0][2:], schedule.orders[1]]))
    assert message.startswith("schedule 'gpipe': 2 failures")
    assert "forward of microbatch 0 at stage 0" in message
    assert "forward of microbatch 1 at stage 0" in message


def test_a_huge_number_is_refused_at_once():
    message = refusal(Schedule(name="mine", orders=[[Task("forward", 0, 0)]], stages=10**12, microbatches=10**12))
    assert message.startswith("schedule 'mine', showing the first 10: 10 failures")


def test_invalid_schedules_are_not_simulated():
    schedule = schedules.gpipe(stages=1, microbatches=2)
    broken = changed(schedule, [schedule.orders[0][::-1]])
    for call in (broken.simulate, broken.ticks):
        with pytest.raises(ShardingError, match="deadlock"):
            call()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stages": 0}, "stages=0"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"slices": 1.5}, "slices=1.5"),
        ({"chunks": -1}, "chunks=-1"),
        ({"microbatches_per_update": -2}, "microbatches_per_update=-2"),
        ({"orders": []}, "devices=0"),
        ({"orders": [[Task("forward", 0, 0)], []]}, "no task on device 1"),
    ],
)
def test_invalid_sizes(fields, words):
    good = {"name": "mine", "orders": [[Task("forward", 0, 0)]], "stages": 1, "microbatches": 1}
    with pytest.raises(ShardingError, match=words):
        Schedule(**(good | fields))


def test_equal_tables_are_equal():
    made_twice = [schedules.zb_v(stages=3, microbatches=5) for _ in range(2)]
    assert made_twice[0] == made_twice[1]
    assert len(set(made_twice)) == 1
    assert made_twice[0] != schedules.zb_v(stages=3, microbatches=6)


def test_random_shuffles_rarely_run():
    """Random orders: an error exactly where the simulation stalls."""
    chance = random.Random(0)
    verdicts = set()
    for _ in range(60):
        schedule = make_schedule(
            *chance.choice([("gpipe", 2, 1), ("one_f_one_b", 1, 3), ("zb_h1", 2, 1), ("terapipe-3", 1, 1)])
        )
        orders = [chance.sample(order, len(order)) for order in schedule.orders]
        judge(changed(schedule, orders))
        verdicts.add(simulate_by_clock(changed(schedule, orders), lambda task: 1) is None)
    assert verdicts == {True, False}
