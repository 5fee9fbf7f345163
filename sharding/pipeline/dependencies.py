"""What each task of a schedule waits for, and an order in which all of them can be done.

    forward(stage, microbatch)           after  forward(stage - 1, microbatch)
    backward-input(stage, microbatch)    after  forward(stage, microbatch), backward-input(stage + 1, microbatch)
    backward-weight(stage, microbatch)   after  backward-input(stage, microbatch)

A whole backward is a backward-input whose weight part is done with it. Where tokens are cut in slices, a slice also
waits for the one before it at its stage (its keys and values), and backwards for the one after it (their gradients). A
forward with weights of version v waits until all microbatches of the first v updates have been through the stage's
backward. And on a device every task waits for the one before it.
"""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .table import Located, Table, Task

Cell = tuple[str, int, int, int]
"""(what is made, stage, microbatch, slice): an output, an input's gradient, or a weight's gradient."""


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """The tasks of a valid table, numbered device by device, and what each waits for."""

    located: tuple[Located, ...]
    needs: tuple[tuple[int, ...], ...]
    """Per task the tasks whose results it uses."""
    before: tuple[int | None, ...]
    """Per task the one before it on its device."""

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All tasks, each after those that it waits for.

        Raises:
            graphlib.CycleError: tasks wait for each other.
        """
        edges = zip(self.needs, self.before, strict=True)
        graph = {task: (*needs, *(() if last is None else (last,))) for task, (needs, last) in enumerate(edges)}
        return tuple(graphlib.TopologicalSorter(graph).static_order())


def dependencies(table: Table) -> Dependencies:
    """What each task waits for; what it needs and the table doesn't have is left out."""
    located = tuple(table.located())
    made = {cell: number for number, one in enumerate(located) for cell in cells_made(one.task)}
    updates = _updates(table, located)
    return Dependencies(
        located=located,
        needs=tuple(
            tuple(made[cell] for cell in cells_needed(one.task, table) if cell in made) + updates[_waits_for(one.task)]
            for one in located
        ),
        before=tuple(number - 1 if one.place else None for number, one in enumerate(located)),
    )


def cells_made(task: Task) -> Iterator[Cell]:
    """What there is once a task is done."""
    where = (task.stage, task.microbatch, task.slice)
    if task.kind == "forward":
        yield ("output", *where)
    if task.sends_gradient:
        yield ("input gradient", *where)
    if task.frees_activation:
        yield ("weight gradient", *where)


def cells_needed(task: Task, table: Table) -> Iterator[Cell]:
    """What must be there before a task begins."""
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


def _waits_for(task: Task) -> tuple[int, int]:
    """The (stage, version) whose updates a task waits for; version 0 is there from the start."""
    return (task.stage, task.version if task.kind == "forward" else 0)


def _updates(table: Table, located: tuple[Located, ...]) -> defaultdict[tuple[int, int], tuple[int, ...]]:
    """Per stage and version the tasks that end its updates: on each device of the stage the last one."""
    last: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for number, (task, device, _) in enumerate(located):  # by place, so that the last one stays
        if task.frees_activation:
            last[task.stage, task.microbatch // table.microbatches_per_update + 1][device] = number
    found: defaultdict[tuple[int, int], tuple[int, ...]] = defaultdict(tuple)
    for stage in range(table.stages):
        latest: dict[int, int] = {}  # of all updates so far: an earlier microbatch may be done later
        for version in range(1, table.microbatches // table.microbatches_per_update + 1):
            for device, number in last[stage, version].items():
                latest[device] = max(number, latest.get(device, number))
            found[stage, version] = tuple(latest.values())
    return found
