"""Validation of schedules; errors name each task with its device and its position in the device's order."""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from ..errors import ShardingError, raise_together
from .dependencies import Dependencies, dependencies
from .task_table import KINDS, Located, Task, TaskTable, is_integer, positions_text

MAX_LISTED = 10
"""Failures of one kind listed in an error."""

UNSPLIT_KINDS = ("forward", "backward")
SPLIT_KINDS = ("forward", "backward-input", "backward-weight")


def check(table: TaskTable) -> Dependencies:
    """The dependencies of a valid table.

    Raises:
        ShardingError: tasks that are out of range, missing or repeated; a microbatch whose tasks at a stage are on
            several devices or use several weight versions; a deadlock.
    """
    for rule in (_out_of_range, _missing_or_repeated, _on_several_devices, _with_several_versions):
        _raise_failures(table, list(islice(rule(table), MAX_LISTED + 1)))
    found = dependencies(table)
    try:
        found.order  # noqa: B018 - raises on a cycle; cached for later use
    except graphlib.CycleError as error:
        raise _deadlock(table, found, error.args[1]) from None
    return found


def _raise_failures(table: TaskTable, failures: Sequence[ShardingError]) -> None:
    """Raises all failures as one error that names the table, if there are any."""
    asked = f"schedule {table.name!r}"
    if len(failures) == 1:
        raise ShardingError(f"{asked}: {failures[0].asked}", found=failures[0].found, required=failures[0].required)
    more = f", showing the first {MAX_LISTED}" if len(failures) > MAX_LISTED else ""
    raise_together(asked + more, failures[:MAX_LISTED])


def _out_of_range(table: TaskTable) -> Iterator[ShardingError]:
    """Tasks of an unknown kind, or with a stage, microbatch, slice or version out of range."""
    for one in table.located():
        task = one.task
        limits = {
            "stage": (task.stage, table.stages),
            "microbatch": (task.microbatch, table.microbatches),
            "slice": (task.slice, table.slices),
            "version": (task.version, table.microbatches // table.microbatches_per_update + 1),
        }
        bad = [
            f"{name} {value!r}, not in 0..{limit - 1}"
            for name, (value, limit) in limits.items()
            if not is_integer(value) or not 0 <= value < limit
        ]
        bad += [f"kind {task.kind!r}, not one of {', '.join(KINDS)}"] if task.kind not in KINDS else []
        if bad:
            yield ShardingError(str(one), found=bad, required="a kind, stage, microbatch, slice and version in range")


def _missing_or_repeated(table: TaskTable) -> Iterator[ShardingError]:
    """Tasks that are missing or repeated."""
    found: dict[tuple[int, int, int], dict[str, list[Located]]] = defaultdict(lambda: defaultdict(list))
    for one in table.located():
        found[one.task.stage, one.task.microbatch, one.task.slice][one.task.kind].append(one)
    for where in _units(table):
        kinds = found[where]
        split = "backward-input" in kinds or "backward-weight" in kinds
        for kind in SPLIT_KINDS if split else UNSPLIT_KINDS:
            if len(kinds[kind]) != 1:
                there = f"{len(kinds[kind])} times: {positions_text(kinds[kind])}" if kinds[kind] else "on no device"
                yield ShardingError(str(Task(kind, *where)), found=there, required="each task exactly once")
        if split and "backward" in kinds:
            there = [str(one) for kind in ("backward", *SPLIT_KINDS[1:]) for one in kinds[kind]]
            yield ShardingError(
                str(kinds["backward"][0]), found=there, required="either a full backward or its two parts"
            )


def _units(table: TaskTable) -> Iterator[tuple[int, int, int]]:
    """Every stage, microbatch and slice of the table."""
    for stage in range(table.stages):
        for microbatch in range(table.microbatches):
            yield from ((stage, microbatch, part) for part in range(table.slices))


def _on_several_devices(table: TaskTable) -> Iterator[ShardingError]:
    """Microbatches whose tasks at one stage are on several devices: activations stay on the device that made them."""
    for (stage, microbatch), tasks in _by_microbatch(table):
        if len({one.device for one in tasks}) > 1:
            yield ShardingError(
                f"microbatch {microbatch} at stage {stage}",
                found=[str(one) for one in tasks],
                required="all tasks of a microbatch at a stage on one device",
            )


def _with_several_versions(table: TaskTable) -> Iterator[ShardingError]:
    """Microbatches that use several versions of a stage's weights."""
    for (stage, microbatch), tasks in _by_microbatch(table):
        if len({one.task.version for one in tasks}) > 1:
            yield ShardingError(
                f"microbatch {microbatch} at stage {stage}",
                found=[f"version {one.task.version}: {one}" for one in tasks],
                required="the same weight version in the forward and backward of a microbatch at a stage",
            )


def _by_microbatch(table: TaskTable) -> Iterator[tuple[tuple[int, int], list[Located]]]:
    """The tasks of each microbatch at each stage."""
    found: dict[tuple[int, int], list[Located]] = defaultdict(list)
    for one in table.located():
        found[one.task.stage, one.task.microbatch].append(one)
    yield from found.items()


def _deadlock(table: TaskTable, found: Dependencies, cycle: Sequence[int]) -> ShardingError:
    """The error for a dependency cycle, in which each task is a dependency of the next."""
    waits = [
        f"{found.located[later]} waits for {found.located[earlier]}{_note(found.located[later], earlier, found)}"
        for earlier, later in zip(cycle, cycle[1:], strict=False)
        if earlier in found.needs[later] and not _is_ordered_before(found.located[earlier], found.located[later])
    ]
    return ShardingError(
        f"schedule {table.name!r}: deadlock",
        found=waits[::-1],
        required="each task after all tasks that it depends on, directly or through other devices",
        fix="reorder the tasks, or start from one of pipeline.schedules",
    )


def _is_ordered_before(earlier: Located, later: Located) -> bool:
    """Whether the device's own order already puts one before the other."""
    return earlier.device == later.device and earlier.position < later.position


def _note(later: Located, earlier: int, found: Dependencies) -> str:
    """A note that a forward waits for a weight version, where it does."""
    awaited = found.located[earlier].task
    updated = later.task.kind == "forward" and awaited.frees_activation
    return f", the last task of weight version {later.task.version}" if updated else ""
