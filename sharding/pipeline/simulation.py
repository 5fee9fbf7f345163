"""When each task of a schedule runs, and what that costs: time, idle devices, activations, versions of the weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from numbers import Real
from pathlib import Path

from ..errors import ShardingError
from .chart import Chart, chart
from .dependencies import Dependencies
from .table import Table, Task
from .trace import write_trace
from .validity import check

Duration = float | Sequence[float] | Callable[[Task], float]
"""A number: for a microbatch through one device's part of the model; a chunk and a slice take their share of it.
A sequence: one number per stage, as it is; a slice takes its share. A function: of the task, as it is."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A schedule whose tasks have times.

    Times are in the unit in which they were given. Activations are counted in those of one microbatch through one
    device's part of the model, from the beginning of a forward to the end of the last task that needs them.
    """

    table: Table
    starts: tuple[tuple[float, ...], ...]
    """Per device, at each place of its order."""
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first task's beginning to the last one's end."""
        return max(ends[-1] for ends in self.ends)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per device, the time in which it does something."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple(math.fsum(end - start for start, end in zip(*pair, strict=True)) for pair in pairs)

    @property
    def idle(self) -> tuple[float, ...]:
        """Per device, the rest of the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Per device, what is idle between its first and last task: all that is where no flush ends a step."""
        spans = [ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)]
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Of all devices' time, what is idle."""
        return math.fsum(self.idle) / (self.makespan * self.table.devices) if self.makespan else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Per device, the most that it holds at a time."""
        return tuple(_most_held(order) * self.table.share for order in self.table.orders)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Per device, the most versions of a stage's weights that it holds: the newest, and those still to be used."""
        per_update = self.table.microbatches_per_update
        return tuple(
            max(_most_versions([task for task in order if task.stage == stage], per_update) for stage in stages)
            for order, stages in zip(self.table.orders, self.table.placement, strict=True)
        )

    @property
    def staleness(self) -> tuple[int, ...]:
        """Per device, the most updates that the weights of a task miss of those by all microbatches before its own."""
        per_update = self.table.microbatches_per_update
        return tuple(max(task.microbatch // per_update - task.version for task in order) for order in self.table.orders)

    def plot(self) -> Chart:
        """The Gantt chart, which a notebook shows."""
        return chart(self.table, self.starts, self.ends)

    def trace(self, path: str | Path) -> None:
        """Writes a file that Perfetto (ui.perfetto.dev) and chrome://tracing open, a unit of time as a millisecond."""
        write_trace(path, self.table, self.starts, self.ends)


def simulate(
    table: Table, *, forward: Duration, backward: Duration, weight: Duration | None, send: float, lockstep: bool
) -> Simulation:
    """Each task as early as its device and what it waits for allow; see ``Schedule.simulate``."""
    found = check(table)
    durations = task_times(table, forward, backward, weight)
    _valid("send", send)
    starts = _lockstep_starts(found, durations, send) if lockstep else _starts(found, durations, send)
    ends = [start + taken for start, taken in zip(starts, durations, strict=True)]
    return Simulation(table=table, starts=_per_device(starts, table), ends=_per_device(ends, table))


def ticks(found: Dependencies) -> list[int]:
    """Per task its earliest tick: a device does at most one task in a tick, and results arrive after it."""
    tick = [0] * len(found.located)
    for task in found.order:
        last = found.before[task]
        earlier = (*found.needs[task], *(() if last is None else (last,)))
        tick[task] = max((tick[one] + 1 for one in earlier), default=0)
    return tick


def _starts(found: Dependencies, durations: Sequence[float], send: float) -> list[float]:
    """A task begins once the one before it on its device has ended and all that it needs has arrived."""
    starts = [0.0] * len(found.located)
    ends = [0.0] * len(found.located)
    for task in found.order:
        here, last = found.located[task].device, found.before[task]
        arrivals = [ends[one] + (send if found.located[one].device != here else 0.0) for one in found.needs[task]]
        starts[task] = max([0.0 if last is None else ends[last], *arrivals])
        ends[task] = starts[task] + durations[task]
    return starts


def _lockstep_starts(found: Dependencies, durations: Sequence[float], send: float) -> list[float]:
    """All devices begin a tick together; it takes as long as its longest task and one transfer."""
    tick = ticks(found)
    longest = [0.0] * (max(tick) + 1)
    for number, taken in zip(tick, durations, strict=True):
        longest[number] = max(longest[number], taken)
    begins = list(accumulate((length + send for length in longest), initial=0.0))
    return [begins[number] for number in tick]


def task_times(table: Table, forward: Duration, backward: Duration, weight: Duration | None) -> list[float]:
    """What each task takes, by device and place; the parts of a backward together take as long as a whole one."""

    def of(name: str, given: Duration, task: Task) -> float:
        if callable(given):
            return _valid(f"{name}({task})", given(task))
        if isinstance(given, Sequence):
            _one_per_stage(name, given, table)
            return _valid(f"{name}[{task.stage}]", given[task.stage]) / table.slices
        return _valid(name, given) * table.share

    def duration(task: Task) -> float:
        if task.kind == "forward":
            return of("forward", forward, task)
        whole = of("backward", backward, task)
        part = whole / 2 if weight is None else of("weight", weight, task)
        if part > whole:
            raise ShardingError(
                "simulate(weight)",
                there=f"weight {part:g} and backward {whole:g} of {task}",
                must="weight is a part of backward: backward-input takes backward - weight",
                fix="backward = the sum of both parts",
            )
        return {"backward": whole, "backward-input": whole - part, "backward-weight": part}[task.kind]

    return [duration(one.task) for one in table.located()]


def _valid(name: str, value: float) -> float:
    if not (isinstance(value, Real) and math.isfinite(value) and value >= 0):
        raise ShardingError(f"simulate({name})", there=f"{value!r}", must="a finite time of at least 0")
    return value


def _one_per_stage(name: str, given: Sequence[float], table: Table) -> None:
    if len(given) != table.stages:
        raise ShardingError(
            f"simulate({name})",
            there=f"{len(given)} times for {table.stages} stages, which are on devices as {table.placement}",
            must="one time per stage, in the order of the model",
            fix="a number for all of them",
        )


def _per_device(values: Sequence[float], table: Table) -> tuple[tuple[float, ...], ...]:
    following = iter(values)
    return tuple(tuple(islice(following, len(order))) for order in table.orders)


def _most_held(order: Iterable[Task]) -> int:
    """The most activations at a time: one more with each forward, one less with what frees it."""
    changes = (1 if task.kind == "forward" else -1 if task.frees_activation else 0 for task in order)
    return max(accumulate(changes))


def _most_versions(tasks: Sequence[Task], per_update: int) -> int:
    """The most versions of one stage's weights: the newest, and those made before that a task is still to use."""
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
