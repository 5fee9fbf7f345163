"""Step time estimates: ops and collectives timed by a chip's rates, with compute and communication overlapped.

Every op is one task on the device's stream and every collective one on its links, in program order, each after its
dependencies (`cost.simulate`). A loop's tasks are multiplied by its trip count. Elementwise ops fuse into their
consumers, so arrays between them are never stored; devices that share a host's cores do not overlap. At a chip's peak
rates the estimate is a lower bound; at measured rates (`sharding calibrate`) it is close.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from ..cost import Task, Timeline, Topology, collective_seconds, op_seconds, simulate, work
from ..graph import Graph, Op
from ..propagation import Assignment
from ..rules.rule_table import ELEMENTWISE
from ..spec import Spec, local_shape
from .collective_ledger import Collective
from .predicted_collectives import ProgramCollectives
from .units import seconds_text

FUSED = ELEMENTWISE | {"broadcast_in_dim", "iota", "reshape", "squeeze"}
"""Ops that XLA fuses into their consumers."""
NO_WORK = frozenset({"annotate", "barrier", "edge", "same", "scan xs", "scan ys", "shard_map"})
"""Ops that only constrain shardings; a slice of a scan's stacked input is read where it is used."""
DEVICE, LINKS = "device", "links"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOp:
    """One op or collective and its time over all of its runs."""

    name: str
    source: str
    seconds: float
    is_collective: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The time of one call on each device; prints as a short table."""

    name: str
    chip: str
    parts: tuple[TimedOp, ...]
    """In program order."""
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
        """The sum over all collectives."""
        return sum(p.seconds for p in self.parts if p.is_collective)

    @property
    def exposed_seconds(self) -> float:
        """Idle time: how long the device waits for collectives."""
        return self.seconds - self.compute_seconds

    @property
    def by_source(self) -> dict[str, float]:
        """The user's line -> seconds of its ops and collectives, most first."""
        sums: dict[str, float] = {}
        for p in self.parts:
            sums[p.source] = sums.get(p.source, 0.0) + p.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        lines = [
            f"{self.name} on {self.chip}: {seconds_text(self.seconds)} per step",
            f"compute        {seconds_text(self.compute_seconds)}",
            f"communication  {seconds_text(self.communication_seconds)}",
            f"idle           {seconds_text(self.exposed_seconds)}",
            "",
        ]
        most = list(self.by_source.items())[:10]
        return "\n".join([*lines, *(f"{seconds_text(seconds):>10}  {source or 'unknown'}" for source, seconds in most)])


def estimate(assignment: Assignment, on: Topology, *, name: str = "") -> Estimate:
    """The time of one call of a completed program on the given devices and links."""
    tasks, parts = [], []
    for task, part in _Tasks(assignment, on).all():
        tasks.append(task)
        parts.append(part)
    return Estimate(name=name, chip=str(on.devices), parts=tuple(parts), timeline=simulate(tasks))


class _Tasks:
    """The tasks of a program, in program order."""

    def __init__(self, assignment: Assignment, on: Topology):
        self.assignment, self.graph, self.on = assignment, assignment.graph, on
        self.program = ProgramCollectives(assignment, platform=on.chip.platform)
        self.fused = _fused(self.graph)
        self.links = LINKS if on.chip.sends_while_computing else DEVICE
        self.ready: dict[int, tuple[str, ...]] = {}  # value -> the tasks that it depends on
        self.number = 0

    def all(self) -> Iterator[tuple[Task, TimedOp]]:
        for op, transfers in self.program.ops():
            waits = [t for v in op.operands for t in self.ready.get(v, ())]
            for transfer in transfers:
                if transfer.is_before:
                    task = self.collective(transfer.collective, self.ready.get(transfer.value, ()))
                    yield task
                    waits.append(task[0].name)
                    self.ready[transfer.value] = (task[0].name,)
            seconds = self.seconds(op)
            if seconds:
                task = self.task(op.name, DEVICE, seconds, waits, op.source)
                yield task
                waits = [task[0].name]
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
        return self.task(c.kind, self.links, seconds, after, c.source, is_collective=True)

    def task(
        self, name: str, stream: str, seconds: float, after: Sequence[str], source: str, *, is_collective: bool = False
    ) -> tuple[Task, TimedOp]:
        task = Task(name=f"{self.number} {name}", stream=stream, seconds=seconds, after=tuple(dict.fromkeys(after)))
        self.number += 1
        return task, TimedOp(name=name, source=source, seconds=seconds, is_collective=is_collective)

    def seconds(self, op: Op) -> float:
        """Time of an op on one device, over all of its runs."""
        if op.name in NO_WORK or not op.site:
            return 0.0
        values = (*op.operands, *op.results)
        if op.rule is not None:
            strategy = self.program.strategies.of(op)
            specs = (*strategy.operand_specs, *strategy.result_specs)
        else:
            specs = tuple(self.assignment.specs[v] for v in values)
        arrays = [self.local(v, spec) for v, spec in zip(values, specs, strict=True)]
        n = len(op.operands)
        done = work(op.name, arrays[:n], arrays[n:], op.site[0].params)
        stored = sum(
            math.prod(a.shape) * self.graph.itemsize(v) for v, a in zip(values, arrays, strict=True) if v in self.fused
        )
        kept = max(0.0, done.num_bytes - stored)
        if not kept and op.name in FUSED:  # fused: its arithmetic alone
            return op.times * done.flops / self.on.chip.rates.vector_flops_per_second
        return op.times * op_seconds(dataclasses.replace(done, read_bytes=kept, written_bytes=0), self.on.chip)

    def local(self, v: int, spec: Spec) -> jax.ShapeDtypeStruct:
        shape = local_shape(spec.axes, self.graph.shapes[v], self.assignment.sizes)
        return jax.ShapeDtypeStruct(shape, self.graph.dtypes[v])


def _fused(graph: Graph) -> set[int]:
    """Values that are never stored, as XLA fuses their ops into the consumers."""
    stored = {*graph.inputs, *graph.outputs}
    for op in graph.ops:
        if op.name not in FUSED:
            stored.update(op.results)
            if not _reduces(op):
                stored.update(v for v in op.operands if v in graph.makers)
    return set(range(len(graph.shapes))) - stored


def _reduces(op: Op) -> bool:
    return op.name.startswith("reduce_") or op.name == "annotate"
