"""Step time estimates: ops and collectives timed by a chip's rates, with compute and communication overlapped.

Every op is one task on the device's stream, each after its dependencies (`cost.simulate`), in program order, or on GPUs
in that of XLA's scheduler (`cost/latency_hiding.py`). A collective that the platform's compiler starts asynchronously
(`ASYNCHRONOUS`: a start and a done in the compiled schedule) is a task on the links, beside compute; any other one is
on the device's stream. Copies to and from the host's memory run beside both. A loop's tasks are multiplied by its trip
count. Elementwise ops fuse into their consumers, so arrays between them are never stored. At a chip's peak rates the
estimate is a lower bound; at measured rates (`sharding calibrate`) it is close.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..cost import (
    KINDS,
    Kind,
    Task,
    Timeline,
    Topology,
    collective_seconds,
    latency_hiding,
    simulate,
)
from ..display import Column, Table, Tabular
from ..display.units import seconds_text
from ..graph import Op
from ..hardware import Chip, Platform
from ..propagation import Assignment
from ..spec import axis_name
from .collective_ledger import Collective
from .host_copies import HostCopy, host_copies_of
from .op_runs import OpRuns
from .predicted_collectives import ProgramCollectives

DEVICE, LINKS = "device", "links"
ASYNCHRONOUS: Mapping[Platform, Collection[Kind]] = {
    "cpu": (),
    "tpu": ("collective-permute", "reduce-scatter"),
    "gpu": KINDS,
}
"""The kinds of collectives that run beside compute, as compiled schedules have them. XLA:CPU waits for each. XLA:TPU
(libtpu 0.0.50.1, v5p) starts only collective-permutes, of which it also makes the reduce-scatters of large products,
and for some chips all-gathers (`Chip.gathers_while_computing`). XLA:GPU (JAX 0.12.0.1, H100) starts all, and leaves
those synchronous that have nothing to overlap with."""


def asynchronous(chip: Chip) -> frozenset[Kind]:
    """The kinds of collectives that run beside compute on a chip."""
    gathers: Collection[Kind] = ("all-gather",) if chip.gathers_while_computing else ()
    return frozenset((*ASYNCHRONOUS[chip.platform], *gathers) if chip.sends_while_computing else ())


COLUMNS = (
    Column("op", "code"),
    Column("line", "code"),
    Column("limit"),
    Column("ops", "number"),
    Column("time", "seconds"),
)
TOTAL_COLUMNS = (Column("part"), Column("time", "seconds"), Column("share of the step", "share"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOp:
    """One op or collective and its time over all of its runs."""

    name: str
    source: str
    seconds: float
    is_collective: bool
    """Whether it communicates: a collective, or a copy to or from the host."""
    limit: str
    """What bounds it: `compute`, `memory`, the links of a collective, as `nvlink over data`, or `host link`."""
    matmul_flops: float = 0.0
    """FLOPs of a matrix product or convolution on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Tabular):
    """The time of one call on each device; prints as a short table."""

    name: str
    chip: str
    peak_flops_per_second: float
    """Of the chip's matrix unit in bfloat16."""
    host_memory_bytes: int = 0
    """One device's share of the host's memory; 0 if unknown."""
    parts: tuple[TimedOp, ...]
    """In program order."""
    folds: bool = True
    """Whether the mesh folds onto the devices' torus; otherwise its axes share links."""
    loops: tuple[str, ...] = ()
    """The lines of loops of unknown length, which count as one iteration."""
    timeline: Timeline
    """Start and end of each task; tasks are numbered, as `0 dot_general`, `1 all-reduce`."""

    @property
    def seconds(self) -> float:
        """Step time, from the first start to the last end."""
        return self.timeline.makespan_seconds

    @property
    def compute_seconds(self) -> float:
        """The sum over all ops."""
        return sum(p.seconds for p in self.parts if not p.is_collective)

    @property
    def communication_seconds(self) -> float:
        """The sum over all collectives, and copies to and from the host's memory."""
        return sum(p.seconds for p in self.parts if p.is_collective)

    @property
    def exposed_seconds(self) -> float:
        """Idle time: how long the device waits for collectives."""
        return self.seconds - self.compute_seconds

    @property
    def seconds_at_peak(self) -> float:
        """How long the matrix products and convolutions take at the chip's peak."""
        return sum(p.matmul_flops for p in self.parts) / (self.peak_flops_per_second or math.inf)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al. 2022, PaLM, appendix B): the FLOPs of products per second, over the
        chip's peak. Products that are recomputed for the backward pass count, too."""
        return self.seconds_at_peak / (self.seconds or math.inf)

    @property
    def bound_text(self) -> str:
        """What bounds the step, as `compute 62%, memory 30%, ici over data 8%`."""
        shares = ((limit, seconds / self.seconds) for limit, seconds in self.by_limit.items() if seconds)
        return ", ".join(f"{limit} {share:.0%}" for limit, share in shares)

    @property
    def by_limit(self) -> dict[str, float]:
        """What bounds the step -> seconds, most first: compute, memory, or the links that the device waits for."""
        sums: dict[str, float] = {}
        for p in self.parts:
            if not p.is_collective:
                sums[p.limit] = sums.get(p.limit, 0.0) + p.seconds
        for limit, seconds in self._waits():
            sums[limit] = sums.get(limit, 0.0) + seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def _waits(self) -> Iterator[tuple[str, float]]:
        """The links of each collective, and for how long the device has nothing to do meanwhile."""
        spans = [(p, self.timeline[f"{k} {p.name}"]) for k, p in enumerate(self.parts)]
        busy = sorted((s.start_seconds, s.end_seconds) for p, s in spans if not p.is_collective)
        waits = sorted((s.start_seconds, s.end_seconds, p.limit) for p, s in spans if p.is_collective)
        k, ends = 0, dict[str, float]()
        for start, end, limit in waits:
            start = max(start, ends.get(limit, 0.0))  # both directions of a host link at once count once
            ends[limit] = max(end, start)
            if start >= end:
                continue
            while k < len(busy) and busy[k][1] <= start:
                k += 1
            now, idle, at = start, 0.0, k
            while at < len(busy) and busy[at][0] < end:
                idle += max(0.0, busy[at][0] - now)
                now = max(now, busy[at][1])
                at += 1
            yield limit, idle + max(0.0, end - now)

    @property
    def by_source(self) -> dict[str, float]:
        """The user's line -> seconds of its ops and collectives, most first."""
        sums: dict[str, float] = {}
        for p in self.parts:
            sums[p.source] = sums.get(p.source, 0.0) + p.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def tables(self) -> list[Table]:
        """The ops and collectives, those of one line and one limit in one row, most seconds first; then the totals."""
        found: dict[tuple[str, str, str], tuple[int, float]] = {}
        for p in self.parts:
            num, seconds = found.get((p.name, p.source, p.limit), (0, 0.0))
            found[p.name, p.source, p.limit] = (num + 1, seconds + p.seconds)
        rows = sorted(((*key, *amounts) for key, amounts in found.items()), key=lambda row: -row[-1])
        totals = [(name, seconds, seconds / (self.seconds or 1.0)) for name, seconds in self._totals()]
        return [Table("", COLUMNS, rows), Table(self._title(), TOTAL_COLUMNS, totals)]

    def _title(self) -> str:
        return f"{self.name} on {self.chip}: {seconds_text(self.seconds)} per step"

    def _totals(self) -> list[tuple[str, float]]:
        sums = (self.compute_seconds, self.communication_seconds, self.exposed_seconds)
        return list(zip(("compute", "communication", "idle"), sums, strict=True))

    def notes(self) -> list[str]:
        """What bounds the step, whether axes share links, and which loops count as one iteration."""
        return [
            f"MFU            {self.mfu:.1%}",
            f"bound by       {self.bound_text}",
            *([] if self.folds else [f"the mesh does not fold onto the torus of {self.chip}: its axes share links"]),
            *(f"one iteration of the loop of unknown length at {source or 'an unknown line'}" for source in self.loops),
        ]

    def __str__(self) -> str:
        totals = [f"{name:<15}{seconds_text(seconds)}" for name, seconds in self._totals()]
        lines = [self._title(), *totals, *self.notes(), ""]
        most = list(self.by_source.items())[:10]
        return "\n".join([*lines, *(f"{seconds_text(seconds):>10}  {source or 'unknown'}" for source, seconds in most)])

    __repr__ = __str__


def estimate(
    assignment: Assignment, on: Topology, *, name: str = "", known: ProgramCollectives | None = None
) -> Estimate:
    """The time of one call of a completed program on the given devices and links; its collectives may be known."""
    tasks, parts = [], []
    program = ProgramCollectives(assignment, platform=on.chip.platform) if known is None else known
    for task, part in _Tasks(assignment, on, program).all():
        tasks.append(task)
        parts.append(part)
    return Estimate(
        name=name,
        chip=str(on.devices),
        peak_flops_per_second=on.chip.rates.bfloat16_flops_per_second,
        host_memory_bytes=on.chip.host_memory_bytes or 0,
        parts=tuple(parts),
        folds=on.folds,
        loops=tuple(dict.fromkeys(loop.source for op in assignment.graph.ops for loop in op.loops)),
        timeline=simulate(_as_scheduled(tasks, parts) if on.chip.platform == "gpu" else tasks),
    )


def _as_scheduled(tasks: Sequence[Task], parts: Sequence[TimedOp]) -> list[Task]:
    """The tasks in the order of XLA:GPU's latency-hiding scheduler, each behind those that it places before it."""
    numbers = {task.name: k for k, task in enumerate(tasks)}
    works = [
        latency_hiding.Work(
            microseconds=1e6 * task.seconds,
            after=tuple(numbers[name] for name in task.after),
            is_collective=part.is_collective,
            is_view=not task.seconds and not part.is_collective,
        )
        for task, part in zip(tasks, parts, strict=True)
    ]
    found, before = [], ()
    for k, part in latency_hiding.latency_hiding_order(works):
        if part != "end":
            found.append(dataclasses.replace(tasks[k], after=tuple(dict.fromkeys([*tasks[k].after, *before]))))
        if part == "kernel":
            before = (tasks[k].name,)
    return found


class _Tasks:
    """The tasks of a program, in program order."""

    def __init__(self, assignment: Assignment, on: Topology, program: ProgramCollectives):
        self.assignment, self.graph, self.on, self.program = assignment.as_run, assignment.graph, on, program
        self.runs = OpRuns(self.assignment, on, program.strategies)
        self.sources = self.graph.once("sources of ops", dict[int, str])
        self.asynchronous = asynchronous(on.chip)
        self.ready: dict[int, tuple[str, ...]] = {}  # value -> the tasks that it depends on
        self.number = 0
        self.times = 1  # of the current loop
        self.last: tuple[str, ...] = ()  # the device's last task
        self.copies: list[str] = []  # in the current loop
        self.started: tuple[str, ...] = ()  # the last task and copies before the current loop

    def all(self) -> Iterator[tuple[Task, TimedOp]]:
        for op, transfers in self.program.ops:
            if op.times != self.times:
                self.times, self.started, self.copies = op.times, (*self.last, *self.copies), []
            waits = [t for v in op.operands for t in self.ready.get(v, ())]
            for transfer in transfers:
                if transfer.is_before:
                    task = self.collective(transfer.collective, self.ready.get(transfer.value, ()))
                    yield task
                    waits.append(task[0].name)
                    self.ready[transfer.value] = (task[0].name,)
            copies = [*host_copies_of(op, self.assignment)] if op.name == "device_put" else []
            for copy in copies:
                task = self.host_copy(copy, waits)
                yield task
                waits = [task[0].name]
                self.copies += waits
            run = None if copies else self.runs.of(op)
            if run is not None and run.seconds:
                given = {"limit": run.limit, "matmul_flops": run.matmul_flops}
                task = self.task(op.name, DEVICE, run.seconds, waits, self.source(op), **given)
                yield task
                waits = [task[0].name]
                self.last = (task[0].name,)
            for transfer in transfers:
                if not transfer.is_before:
                    task = self.collective(transfer.collective, waits)
                    yield task
                    waits = [task[0].name]
            self.ready.update(dict.fromkeys(op.results, tuple(dict.fromkeys(waits))))
        for c in self.program.in_shard_maps():
            yield self.collective(c, ())

    def collective(self, c: Collective, after: Sequence[str]) -> tuple[Task, TimedOp]:
        seconds = c.count * collective_seconds(c.kind, c.result_bytes, c.axes, self.on)
        levels = self.on.levels(c.axes)
        link = levels[-1][0].link if levels else "link"
        limit = f"{link} over {', '.join(map(axis_name, c.axes))}"
        stream = LINKS if c.kind in self.asynchronous else DEVICE
        return self.task(c.kind, stream, seconds, after, c.source, limit=limit, is_collective=True)

    def host_copy(self, copy: HostCopy, after: Sequence[str]) -> tuple[Task, TimedOp]:
        chip = self.on.chip
        stream = copy.direction if chip.sends_while_computing else DEVICE
        name, seconds = f"copy {copy.direction}", copy.seconds(chip)
        return self.task(name, stream, seconds, after, copy.source, limit="host link", is_collective=True)

    def task(
        self, name: str, stream: str, seconds: float, after: Sequence[str], source: str, *, limit: str,
        matmul_flops: float = 0.0, is_collective: bool = False,
    ) -> tuple[Task, TimedOp]:  # fmt: skip
        after = tuple(dict.fromkeys((*self.started, *after)))
        task = Task(name=f"{self.number} {name}", stream=stream, seconds=seconds, after=after)
        self.number += 1
        return task, TimedOp(
            name=name,
            source=source,
            seconds=seconds,
            is_collective=is_collective,
            limit=limit,
            matmul_flops=matmul_flops,
        )

    def source(self, op: Op) -> str:
        """The user's line of an op."""
        found = self.sources.get(id(op))
        if found is None:
            found = self.sources[id(op)] = op.source
        return found
