"""Dependencies between the tasks of a schedule, and a topological order of them.

    forward(stage, microbatch)           after  forward(stage - 1, microbatch)
    backward-input(stage, microbatch)    after  forward(stage, microbatch), backward-input(stage + 1, microbatch)
    backward-weight(stage, microbatch)   after  backward-input(stage, microbatch)

A full backward is a backward-input that computes the weight gradients as well. With sliced tokens, a slice also depends
on the previous slice at its stage (keys and values), and backwards on the next slice (their gradients). A forward with
weight version v depends on the backwards at its stage of all microbatches of the first v updates. On each device, every
task depends on the one before it.
"""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .task_table import Located, Task, TaskTable

Value = tuple[str, int, int, int]
"""(value produced, stage, microbatch, slice): an output, an input gradient, or a weight gradient."""


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """The tasks of a table, numbered device by device, and their dependencies."""

    located: tuple[Located, ...]
    needs: tuple[tuple[int, ...], ...]
    """Per task, the tasks whose results it uses."""
    before: tuple[int | None, ...]
    """Per task, the previous one on its device."""

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All tasks in topological order.

        Raises:
            graphlib.CycleError: the schedule deadlocks.
        """
        edges = zip(self.needs, self.before, strict=True)
        graph = {task: (*needs, *(() if last is None else (last,))) for task, (needs, last) in enumerate(edges)}
        return tuple(graphlib.TopologicalSorter(graph).static_order())


def dependencies(table: TaskTable) -> Dependencies:
    """The dependencies of each task; needed values that no task produces are skipped."""
    located = tuple(table.located())
    producer = {cell: number for number, one in enumerate(located) for cell in values_produced(one.task)}
    updates = _final_tasks_of_updates(table, located)
    return Dependencies(
        located=located,
        needs=tuple(
            tuple(producer[cell] for cell in values_consumed(one.task, table) if cell in producer)
            + updates[_awaited_version(one.task)]
            for one in located
        ),
        before=tuple(number - 1 if one.position else None for number, one in enumerate(located)),
    )


def values_produced(task: Task) -> Iterator[Value]:
    """The values that a task produces."""
    where = (task.stage, task.microbatch, task.slice)
    if task.kind == "forward":
        yield ("output", *where)
    if task.sends_gradient:
        yield ("input gradient", *where)
    if task.frees_activation:
        yield ("weight gradient", *where)


def values_consumed(task: Task, table: TaskTable) -> Iterator[Value]:
    """The values that a task consumes."""
    stage, microbatch, part = task.stage, task.microbatch, task.slice
    if task.kind == "forward":
        if stage > 0:
            yield ("output", stage - 1, microbatch, part)
        if part > 0:
            yield ("output", stage, microbatch, part - 1)
    elif task.kind == "backward-weight":
        yield ("input gradient", stage, microbatch, part)
    else:
        yield ("output", stage, microbatch, part)
        if stage < table.stages - 1:
            yield ("input gradient", stage + 1, microbatch, part)
        if part < table.slices - 1:
            yield ("input gradient", stage, microbatch, part + 1)


def _awaited_version(task: Task) -> tuple[int, int]:
    """The (stage, version) of weights that a task waits for; version 0 is the initial one."""
    return (task.stage, task.version if task.kind == "forward" else 0)


def _final_tasks_of_updates(
    table: TaskTable, located: tuple[Located, ...]
) -> defaultdict[tuple[int, int], tuple[int, ...]]:
    """Per stage and version, the tasks that complete its updates: the last one on each device of the stage."""
    last: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for number, (task, device, _) in enumerate(located):  # in device order: the last one wins
        if task.frees_activation:
            last[task.stage, task.microbatch // table.microbatches_per_update + 1][device] = number
    found: defaultdict[tuple[int, int], tuple[int, ...]] = defaultdict(tuple)
    for stage in range(table.stages):
        latest: dict[int, int] = {}  # over all updates so far: an earlier microbatch may run later
        for version in range(1, table.microbatches // table.microbatches_per_update + 1):
            for device, number in last[stage, version].items():
                latest[device] = max(number, latest.get(device, number))
            found[stage, version] = tuple(latest.values())
    return found
