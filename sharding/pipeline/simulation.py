"""Simulation of a schedule: task times, bubbles, in-flight activations, weight versions and staleness."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from numbers import Real
from pathlib import Path

from ..display.chart import Chart
from ..errors import ShardingError
from .chrome_trace import write_trace
from .dependencies import Dependencies
from .gantt_chart import chart
from .task_table import Task, TaskTable
from .validity import check

Duration = float | Sequence[float] | Callable[[Task], float]
"""A number: time of a microbatch through one device's part of the model; a chunk or a slice takes its fraction.
A sequence: one time per stage; a slice takes its fraction. A function: the time of a task."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A schedule with start and end times.

    Times are in the unit in which they were given. Activations are counted in units of one microbatch through one
    device's part of the model, from the start of a forward to the end of the last task that needs them.
    """

    table: TaskTable
    starts: tuple[tuple[float, ...], ...]
    """Per device, in task order."""
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the start of the first task to the end of the last."""
        return max(ends[-1] for ends in self.ends)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per device, its busy time."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple(math.fsum(end - start for start, end in zip(*pair, strict=True)) for pair in pairs)

    @property
    def idle(self) -> tuple[float, ...]:
        """Per device, the makespan minus its busy time."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Per device, the idle time between its first and last task: all of it where no flush ends a step."""
        spans = [ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)]
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of all devices' time."""
        return math.fsum(self.idle) / (self.makespan * self.table.devices) if self.makespan else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Per device, the peak number of activations in flight."""
        return tuple(_peak_in_flight(order) * self.table.share for order in self.table.orders)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Per device, the peak number of weight versions of a stage: the newest, and older ones still in use."""
        per_update = self.table.microbatches_per_update
        return tuple(
            max(_peak_versions([task for task in order if task.stage == stage], per_update) for stage in stages)
            for order, stages in zip(self.table.orders, self.table.placement, strict=True)
        )

    @property
    def staleness(self) -> tuple[int, ...]:
        """Per device, the maximum number of updates by earlier microbatches that a task's weights lack."""
        per_update = self.table.microbatches_per_update
        return tuple(max(task.microbatch // per_update - task.version for task in order) for order in self.table.orders)

    def plot(self) -> Chart:
        """The Gantt chart, displayed by notebooks."""
        return chart(self.table, self.starts, self.ends)

    def trace(self, path: str | Path) -> None:
        """Writes a file for Perfetto (ui.perfetto.dev) or chrome://tracing, one time unit as a millisecond."""
        write_trace(path, self.table, self.starts, self.ends)


def simulate(
    table: TaskTable, *, forward: Duration, backward: Duration, weight: Duration | None, send: float, lockstep: bool
) -> Simulation:
    """Runs each task as early as its device and its dependencies allow; see ``Schedule.simulate``."""
    found = check(table)
    durations = task_times(table, forward, backward, weight)
    _check_time("send", send)
    starts = _lockstep_starts(found, durations, send) if lockstep else _starts(found, durations, send)
    ends = [start + taken for start, taken in zip(starts, durations, strict=True)]
    return Simulation(table=table, starts=_per_device(starts, table), ends=_per_device(ends, table))


def earliest_ticks(found: Dependencies) -> list[int]:
    """Per task its earliest tick, with at most one task per device and tick and results available from the next."""
    tick = [0] * len(found.located)
    for task in found.order:
        last = found.before[task]
        earlier = (*found.needs[task], *(() if last is None else (last,)))
        tick[task] = max((tick[one] + 1 for one in earlier), default=0)
    return tick


def _starts(found: Dependencies, durations: Sequence[float], send: float) -> list[float]:
    """A task starts once the previous one on its device has ended and its operands have arrived."""
    starts = [0.0] * len(found.located)
    ends = [0.0] * len(found.located)
    for task in found.order:
        here, last = found.located[task].device, found.before[task]
        arrivals = [ends[one] + (send if found.located[one].device != here else 0.0) for one in found.needs[task]]
        starts[task] = max([0.0 if last is None else ends[last], *arrivals])
        ends[task] = starts[task] + durations[task]
    return starts


def _lockstep_starts(found: Dependencies, durations: Sequence[float], send: float) -> list[float]:
    """All devices start a tick together; it takes as long as its longest task plus one transfer."""
    tick = earliest_ticks(found)
    longest = [0.0] * (max(tick) + 1)
    for number, taken in zip(tick, durations, strict=True):
        longest[number] = max(longest[number], taken)
    begins = list(accumulate((length + send for length in longest), initial=0.0))
    return [begins[number] for number in tick]


def task_times(table: TaskTable, forward: Duration, backward: Duration, weight: Duration | None) -> list[float]:
    """The duration of each task, device by device; the two parts of a backward add up to the full one."""

    def of(name: str, given: Duration, task: Task) -> float:
        if callable(given):
            return _check_time(f"{name}({task})", given(task))
        if isinstance(given, Sequence):
            _check_one_per_stage(name, given, table)
            return _check_time(f"{name}[{task.stage}]", given[task.stage]) / table.slices
        return _check_time(name, given) * table.share

    def duration(task: Task) -> float:
        if task.kind == "forward":
            return of("forward", forward, task)
        full = of("backward", backward, task)
        part = full / 2 if weight is None else of("weight", weight, task)
        if part > full:
            raise ShardingError(
                "simulate(weight)",
                found=f"weight {part:g} and backward {full:g} of {task}",
                required="weight at most backward: backward-input takes backward - weight",
                fix="backward = the sum of both parts",
            )
        return {"backward": full, "backward-input": full - part, "backward-weight": part}[task.kind]

    return [duration(one.task) for one in table.located()]


def _check_time(name: str, value: float) -> float:
    if not (isinstance(value, Real) and math.isfinite(value) and value >= 0):
        raise ShardingError(f"simulate({name})", found=f"{value!r}", required="a finite non-negative time")
    return value


def _check_one_per_stage(name: str, given: Sequence[float], table: TaskTable) -> None:
    if len(given) != table.stages:
        raise ShardingError(
            f"simulate({name})",
            found=f"{len(given)} times for {table.stages} stages, placed on devices as {table.placement}",
            required="one time per stage, in model order",
            fix="a single number for all stages",
        )


def _per_device(values: Sequence[float], table: TaskTable) -> tuple[tuple[float, ...], ...]:
    following = iter(values)
    return tuple(tuple(islice(following, len(order))) for order in table.orders)


def _peak_in_flight(order: Iterable[Task]) -> int:
    """Peak activations in flight: a forward adds one, the last task of its microbatch at the stage frees it."""
    changes = (1 if task.kind == "forward" else -1 if task.frees_activation else 0 for task in order)
    return max(accumulate(changes))


def _peak_versions(tasks: Sequence[Task], per_update: int) -> int:
    """Peak versions of one stage's weights: the newest, and older ones that a later task uses."""
    left = Counter(task.microbatch // per_update for task in tasks if task.frees_activation)
    uses = Counter(task.version for task in tasks)
    newest = most = 0
    for task in tasks:
        uses[task.version] -= 1
        if task.frees_activation:
            left[task.microbatch // per_update] -= 1
        while left.get(newest) == 0:
            newest += 1
        uses = +uses
        most = max(most, len({newest, *(version for version in uses if version < newest)}))
    return most
