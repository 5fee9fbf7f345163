"""What is wrong with a schedule: each task is named with its device and its place in the device's order."""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from ..errors import ShardingError, raise_together
from .dependencies import Dependencies, dependencies
from .table import KINDS, Located, Table, Task, is_count, listed

MOST = 10
"""Failures of one kind that are listed."""

WHOLE = ("forward", "backward")
SPLIT = ("forward", "backward-input", "backward-weight")


def check(table: Table) -> Dependencies:
    """What each task of a valid table waits for.

    Raises:
        ShardingError: a task that is not one of this schedule, is missing or is there twice; a microbatch whose
            tasks at a stage are on several devices or use several versions of the weights; tasks that wait for each
            other.
    """
    for rule in (_unknown, _not_once, _scattered, _reweighted):
        _raise(table, list(islice(rule(table), MOST + 1)))
    found = dependencies(table)
    try:
        found.order  # noqa: B018 - sorted here, for all who use it
    except graphlib.CycleError as error:
        raise _deadlock(table, found, error.args[1]) from None
    return found


def _raise(table: Table, failures: Sequence[ShardingError]) -> None:
    """Raises all failures of a table as one that names it, where there are any."""
    asked = f"schedule {table.name!r}"
    if len(failures) == 1:
        raise ShardingError(f"{asked}: {failures[0].asked}", there=failures[0].there, must=failures[0].must)
    more = ", where more is wrong than is listed" if len(failures) > MOST else ""
    raise_together(asked + more, failures[:MOST])


def _unknown(table: Table) -> Iterator[ShardingError]:
    """Tasks of no known kind, or of a stage, microbatch, slice or version that isn't."""
    for one in table.located():
        task = one.task
        limits = {
            "stage": (task.stage, table.stages),
            "microbatch": (task.microbatch, table.microbatches),
            "slice": (task.slice, table.slices),
            "version": (task.version, table.microbatches // table.microbatches_per_update + 1),
        }
        bad = [
            f"{name} {value!r}, not from 0 to {limit - 1}"
            for name, (value, limit) in limits.items()
            if not is_count(value) or not 0 <= value < limit
        ]
        bad += [f"kind {task.kind!r}, not one of {', '.join(KINDS)}"] if task.kind not in KINDS else []
        if bad:
            yield ShardingError(str(one), there=bad, must="every task is one of the schedule's")


def _not_once(table: Table) -> Iterator[ShardingError]:
    """Tasks that are missing, or there more than once."""
    found: dict[tuple[int, int, int], dict[str, list[Located]]] = defaultdict(lambda: defaultdict(list))
    for one in table.located():
        found[one.task.stage, one.task.microbatch, one.task.slice][one.task.kind].append(one)
    for where in _wanted(table):
        kinds = found[where]
        split = "backward-input" in kinds or "backward-weight" in kinds
        for kind in SPLIT if split else WHOLE:
            if len(kinds[kind]) != 1:
                there = f"{len(kinds[kind])} times: {listed(kinds[kind])}" if kinds[kind] else "on no device"
                yield ShardingError(str(Task(kind, *where)), there=there, must="every task is done once")
        if split and "backward" in kinds:
            there = [str(one) for kind in ("backward", *SPLIT[1:]) for one in kinds[kind]]
            yield ShardingError(str(kinds["backward"][0]), there=there, must="a backward is whole or in its two parts")


def _wanted(table: Table) -> Iterator[tuple[int, int, int]]:
    """Every stage, microbatch and slice."""
    for stage in range(table.stages):
        for microbatch in range(table.microbatches):
            yield from ((stage, microbatch, part) for part in range(table.slices))


def _scattered(table: Table) -> Iterator[ShardingError]:
    """Microbatches whose tasks at one stage are on several devices: activations stay where they are made."""
    for (stage, microbatch), tasks in _by_microbatch(table):
        if len({one.device for one in tasks}) > 1:
            yield ShardingError(
                f"microbatch {microbatch} at stage {stage}",
                there=[str(one) for one in tasks],
                must="one device does all tasks of a microbatch at a stage",
            )


def _reweighted(table: Table) -> Iterator[ShardingError]:
    """Microbatches that go forward and backward through a stage with several versions of its weights."""
    for (stage, microbatch), tasks in _by_microbatch(table):
        if len({one.task.version for one in tasks}) > 1:
            yield ShardingError(
                f"microbatch {microbatch} at stage {stage}",
                there=[f"version {one.task.version}: {one}" for one in tasks],
                must="a microbatch goes backward through a stage with the weights with which it went forward",
            )


def _by_microbatch(table: Table) -> Iterator[tuple[tuple[int, int], list[Located]]]:
    """The tasks of each microbatch at each stage."""
    found: dict[tuple[int, int], list[Located]] = defaultdict(list)
    for one in table.located():
        found[one.task.stage, one.task.microbatch].append(one)
    yield from found.items()


def _deadlock(table: Table, found: Dependencies, cycle: Sequence[int]) -> ShardingError:
    """The error of tasks that wait for each other; in the cycle each is waited for by the next."""
    waits = [
        f"{found.located[later]} waits for {found.located[earlier]}{_version(found.located[later], earlier, found)}"
        for earlier, later in zip(cycle, cycle[1:], strict=False)
        if earlier in found.needs[later] and not _stands_before(found.located[earlier], found.located[later])
    ]
    return ShardingError(
        f"schedule {table.name!r}: deadlock",
        there=waits[::-1],
        must="a device's order has every task after those that it waits for, also by way of other devices",
        fix="move the later ones before the earlier ones, or begin from one of pipeline.schedules",
    )


def _stands_before(earlier: Located, later: Located) -> bool:
    """Whether a device does one before the other anyway."""
    return earlier.device == later.device and earlier.place < later.place


def _version(later: Located, earlier: int, found: Dependencies) -> str:
    """Says that it is the weights that a forward waits for, where it is so."""
    awaited = found.located[earlier].task
    updated = later.task.kind == "forward" and awaited.frees_activation
    return f", the last of version {later.task.version} of the weights" if updated else ""
