"""Units, labels, shares and placements of task tables; and the parts of tasks."""

import itertools

import pytest

from sharding import ShardingError
from sharding.pipeline import schedules
from sharding.pipeline.task_table import KINDS, Task, TaskTable, check_multiple, check_positive, is_integer


def table(**sizes: int) -> TaskTable:
    stages, microbatches, slices = (sizes.get(name, 1) for name in ("stages", "microbatches", "slices"))
    order = [Task("forward", *where) for where in itertools.product(range(stages), range(microbatches), range(slices))]
    return TaskTable(name="x", orders=[order], **({"stages": stages, "microbatches": microbatches} | sizes))


def test_units_number_the_slices_of_a_microbatch_next_to_each_other():
    for microbatches, slices in itertools.product((1, 2, 3), (1, 2, 4)):
        found = table(microbatches=microbatches, slices=slices)
        assert found.units == microbatches * slices
        assert [found.unit(task) for task in found.orders[0]] == list(range(found.units))
        for chunks in (1, 3):
            assert table(microbatches=microbatches, slices=slices, chunks=chunks).share == 1 / (chunks * slices)


def test_updates_end_a_step_by_default():
    assert table(microbatches=6).microbatches_per_update == 6
    assert table(microbatches=6, microbatches_per_update=2).microbatches_per_update == 2


def test_labels():
    labels = [Task(kind, 1, 2).label for kind in KINDS]
    assert labels == ["F2", "B2", "I2", "W2"] and Task("forward", 0, 3, 1).label == "F3.1"
    assert str(Task("backward", 1, 2)) == "backward of microbatch 2 at stage 1"
    assert str(Task("backward", 1, 2, 3)) == "backward of microbatch 2, slice 3, at stage 1"


def test_what_tasks_send_and_free():
    found = {kind: (Task(kind, 0, 0).sends_gradient, Task(kind, 0, 0).frees_activation) for kind in KINDS}
    assert found == {
        "forward": (False, False),
        "backward": (True, True),
        "backward-input": (True, False),
        "backward-weight": (False, True),
    }
    parts = Task("backward", 1, 2, 3, 4).parts()
    assert parts == (Task("backward-input", 1, 2, 3, 4), Task("backward-weight", 1, 2, 3, 4))
    assert all(Task(kind, 0, 0).parts() == (Task(kind, 0, 0),) for kind in KINDS if kind != "backward")


def test_placements_are_sorted_and_without_repetition():
    chimera = schedules.chimera(stages=4, microbatches=4)
    assert chimera.devices == 4 and chimera.placement == tuple((d, 3 - d) if d < 2 else (3 - d, d) for d in range(4))
    located = list(chimera.located())
    assert [one.task for one in located] == [task for order in chimera.orders for task in order]
    assert [one.position for one in located if one.device == 2] == list(range(len(chimera.orders[2])))


@pytest.mark.parametrize("name", ["stages", "microbatches", "slices", "chunks", "microbatches_per_update"])
def test_sizes_below_one(name: str):
    sizes = {"stages": 1, "microbatches": 1} | {name: -1}
    with pytest.raises(ShardingError, match=f"{name}=-1"):
        TaskTable(name="x", orders=[[Task("forward", 0, 0)]], **sizes)
    with pytest.raises(ShardingError, match="no task on device 1"):
        TaskTable(name="x", orders=[[Task("forward", 0, 0)], []], stages=1, microbatches=1)


def test_numbers():
    assert [is_integer(x) for x in (0, -3, True, 1.0, "1")] == [True, True, False, False, False]
    check_positive("x", a=1, b=2)
    with pytest.raises(ShardingError, match="a=0") as caught:
        check_positive("x", a=0, b=1, c=True)
    assert caught.value.found == ("a=0", "c=True")
    for number, unit in itertools.product(range(1, 13), range(1, 5)):
        if number % unit == 0:
            check_multiple("x", number, unit, required="y")
            continue
        with pytest.raises(ShardingError, match=f"{number} % {unit} = {number % unit}") as caught:
            check_multiple("x", number, unit, required="y")
        near = min(n for n in range(number, number + unit) if n % unit == 0)
        assert caught.value.fix == (f"microbatches={near}",)
