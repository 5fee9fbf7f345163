"""What a step takes: its ops and collectives timed by a chip's numbers, computing and sending at the same time.

Every op is one task on the device's own stream and every collective one on its links', in program order, each behind
what it needs (`cost.simulate`). What a loop does counts as often as it runs, at once. An elementwise op is done inside
those that use it, so arrays between two of them are never stored; devices that share the cores of a host can't send
while they compute. At a chip's peak rates this is a bound from below; at measured ones (`sharding calibrate`) near.
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
from ..rules.table import ELEMENTWISE
from ..spec import Spec, local_shape
from .communication import Walk
from .ledger import Collective

INLINE = ELEMENTWISE | {"broadcast_in_dim", "iota", "reshape", "squeeze"}
"""Ops that XLA does inside those that use their results."""
NO_WORK = frozenset({"annotate", "barrier", "edge", "same", "scan xs", "scan ys", "shard_map"})
"""Ops that say how arrays lie, or tie them; a slice of a stack is read where it is used."""
DEVICE, LINKS = "device", "links"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one op or collective takes in all of its runs."""

    name: str
    source: str
    seconds: float
    is_collective: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of one call on each device; prints as a short table."""

    name: str
    chip: str
    parts: tuple[Part, ...]
    """In program order."""
    timeline: Timeline
    """When each task begins and ends; tasks are called `0 dot_general`, `1 all-reduce`, as they are numbered."""

    @property
    def seconds(self) -> float:
        """From the first to the last moment."""
        return self.timeline.makespan_seconds

    @property
    def compute_seconds(self) -> float:
        """Of all ops, one after the other."""
        return sum(p.seconds for p in self.parts if not p.is_collective)

    @property
    def communication_seconds(self) -> float:
        """Of all collectives, one after the other."""
        return sum(p.seconds for p in self.parts if p.is_collective)

    @property
    def exposed_seconds(self) -> float:
        """How long the device waits for collectives."""
        return self.seconds - self.compute_seconds

    @property
    def by_source(self) -> dict[str, float]:
        """The user's line -> seconds of its ops and collectives, most first."""
        sums: dict[str, float] = {}
        for p in self.parts:
            sums[p.source] = sums.get(p.source, 0.0) + p.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.chip}: {_text(self.seconds)} a step"]
        lines += [f"computing  {_text(self.compute_seconds)}", f"sending    {_text(self.communication_seconds)}"]
        lines += [f"waiting    {_text(self.exposed_seconds)}", ""]
        most = list(self.by_source.items())[:10]
        return "\n".join([*lines, *(f"{_text(seconds):>10}  {source or 'unknown'}" for source, seconds in most)])


def estimate(assignment: Assignment, on: Topology, *, name: str = "") -> Estimate:
    """What one call of a completed program takes on devices joined in a given way."""
    tasks, parts = [], []
    for task, part in _Tasks(assignment, on).all():
        tasks.append(task)
        parts.append(part)
    return Estimate(name=name, chip=str(on.devices), parts=tuple(parts), timeline=simulate(tasks))


class _Tasks:
    """The tasks of a program, in its order."""

    def __init__(self, assignment: Assignment, on: Topology):
        self.assignment, self.graph, self.on = assignment, assignment.graph, on
        self.walk = Walk(assignment)
        self.inline = _inline(self.graph)
        self.links = LINKS if on.chip.sends_while_computing else DEVICE
        self.ready: dict[int, tuple[str, ...]] = {}  # value -> the tasks behind which it is there
        self.number = 0

    def all(self) -> Iterator[tuple[Task, Part]]:
        for op, transfers in self.walk.ops():
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
        for c in self.walk.own():
            yield self.collective(c, ())

    def collective(self, c: Collective, after: Sequence[str]) -> tuple[Task, Part]:
        seconds = c.count * collective_seconds(c.kind, c.result_bytes, c.axes, self.on)
        return self.task(c.kind, self.links, seconds, after, c.source, is_collective=True)

    def task(
        self, name: str, stream: str, seconds: float, after: Sequence[str], source: str, *, is_collective: bool = False
    ) -> tuple[Task, Part]:
        task = Task(name=f"{self.number} {name}", stream=stream, seconds=seconds, after=tuple(dict.fromkeys(after)))
        self.number += 1
        return task, Part(name=name, source=source, seconds=seconds, is_collective=is_collective)

    def seconds(self, op: Op) -> float:
        """What a device takes for an op, in all of its runs."""
        if op.name in NO_WORK or not op.site:
            return 0.0
        values = (*op.operands, *op.results)
        if op.rule is not None:
            decision = self.walk.decisions.of(op)
            specs = (*decision.needs, *decision.runs_as)
        else:
            specs = tuple(self.assignment.specs[v] for v in values)
        arrays = [self.local(v, spec) for v, spec in zip(values, specs, strict=True)]
        n = len(op.operands)
        done = work(op.name, arrays[:n], arrays[n:], op.site[0].params)
        stored = sum(
            math.prod(a.shape) * self.graph.itemsize(v) for v, a in zip(values, arrays, strict=True) if v in self.inline
        )
        kept = max(0.0, done.num_bytes - stored)
        if not kept and op.name in INLINE:  # inside another op: its arithmetic alone
            return op.times * done.flops / self.on.chip.rates.vector_flops_per_second
        return op.times * op_seconds(dataclasses.replace(done, read_bytes=kept, written_bytes=0), self.on.chip)

    def local(self, v: int, spec: Spec) -> jax.ShapeDtypeStruct:
        shape = local_shape(spec.axes, self.graph.shapes[v], self.assignment.sizes)
        return jax.ShapeDtypeStruct(shape, self.graph.dtypes[v])


def _inline(graph: Graph) -> set[int]:
    """Values that are never stored: made where they are used, by ops that XLA does inside those."""
    stored = {*graph.inputs, *graph.outputs}
    for op in graph.ops:
        if op.name not in INLINE:
            stored.update(op.results)
            if not _reduces(op):
                stored.update(v for v in op.operands if v in graph.makers)
    return set(range(len(graph.shapes))) - stored


def _reduces(op: Op) -> bool:
    return op.name.startswith("reduce_") or op.name == "annotate"


def _text(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
