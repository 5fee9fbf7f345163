"""The memory report: what fills a device at the worst moment of a program, before anything compiles.

What the bytes are predicted from is in `sharding/cost`: the program as one device runs it, which ops XLA computes
inside others, the order, and which arrays take each other's place. Held against the compiler's own figures in the
tests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .. import compat
from ..columns import aligned
from ..graph import Graph
from ..memory import POINTER_BYTES, Usage, usage
from ..memory.instruction import Instruction
from ..memory.liveness import Buffer, Lifetimes
from ..propagation import Assignment
from ..spec import axis_name, sizes_text
from . import kinds
from .capacity import Fit, fit
from .kinds import Kind

ARGUMENTS = "(arguments)"
GAPS = "(gaps)"
"""Bytes between arrays: what one leaves free does not always fit the next."""


class Moment(NamedTuple):
    """One step of the program."""

    step: int
    num_bytes: int
    """There at that step, per device; without gaps."""
    source: str
    """The user's line that runs; empty where JAX kept none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array that is there at the peak."""

    name: str
    """Its path or annotated name; of one that has none its type on one device, as `float32[2, 16]`."""
    kind: Kind
    op: str
    """What makes it: a primitive or a collective; empty for arguments."""
    num_bytes: int
    """On one device."""
    axes: tuple[str, ...]
    """The mesh axes that divide it."""
    born: int
    """The step that makes it."""
    dies: int
    """The last step that reads it."""
    source: str
    """The user's line that makes it; empty for arguments."""
    last_source: str
    """The user's line that reads it last."""
    saved_bytes: Mapping[str, int]
    """Mesh axis that does not divide it -> what a device would hold less if it did; 0 where it divides no dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisShare:
    """What one mesh axis does for the memory at the peak, in bytes per device."""

    axis: str
    num_devices: int
    split_bytes: int
    """Arrays that the axis divides."""
    whole_bytes: int
    """Arrays that it does not divide: every device along it holds the same, or works on them alike."""
    saved_bytes: int
    """What a device would hold less if every array of `whole_bytes` that has a divisible dim were split by it."""

    @property
    def twice_as_long_saves(self) -> int:
        """What a device would hold less with twice as many devices along the axis, split as it is now."""
        return self.split_bytes // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The memory of one device over one call of a program, in bytes; prints as a table."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    argument_bytes: int
    """Arguments that the program reads: there throughout."""
    result_bytes: int
    """Results that take no donated argument's place."""
    temporary_bytes: int
    """The block of memory for all else, gaps included."""
    arrays: tuple[Array, ...]
    """What is there at the peak, largest first."""
    timeline: tuple[Moment, ...]
    """Every step; a loop or a branch is one, with the most that is there inside it."""

    @property
    def peak_bytes(self) -> int:
        """The most that a device holds: arguments, results and temporaries."""
        return self.argument_bytes + self.result_bytes + self.temporary_bytes

    @property
    def gap_bytes(self) -> int:
        """Bytes that lie unused between the arrays at the peak."""
        return self.peak_bytes - sum(a.num_bytes for a in self.arrays)

    @property
    def by_class(self) -> dict[Kind, int]:
        """What arrays are for -> bytes at the peak, most first; gaps too, so that the sum is `peak_bytes`.

        The rules are in `sharding/explain/kinds.py`.
        """
        return _summed([(a.kind, a.num_bytes) for a in self.arrays] + [("gaps", self.gap_bytes)])

    @property
    def by_source(self) -> dict[str, int]:
        """The user's line that makes an array -> bytes at the peak, most first."""
        rows = [(a.source if a.op else ARGUMENTS, a.num_bytes) for a in self.arrays]
        return _summed([*rows, (GAPS, self.gap_bytes)])

    @property
    def by_axis(self) -> dict[str, AxisShare]:
        """Mesh axis -> what it divides at the peak, what it does not, and what splitting that would save."""
        return {
            axis: AxisShare(
                axis=axis,
                num_devices=size,
                split_bytes=sum(a.num_bytes for a in self.arrays if axis in a.axes),
                whole_bytes=sum(a.num_bytes for a in self.arrays if axis not in a.axes),
                saved_bytes=sum(a.saved_bytes.get(axis, 0) for a in self.arrays),
            )
            for axis, size in self.mesh
        }

    def top(self, count: int = 10) -> tuple[Array, ...]:
        """The largest arrays at the peak."""
        return self.arrays[:count]

    def fits(self, chip: str) -> Fit:
        """Whether the peak fits a chip's memory: true or false, with the numbers.

        Args:
            chip: as `"h100"`, `"v5p"`; see `sharding.hardware`.

        Raises:
            ShardingError: an unknown chip, or one whose memory is the host's own.
        """
        return fit(self.peak_bytes, chip)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__


def memory(
    assignment: Assignment, *, name: str = "program", donated: Collection[int] = (), platform: str = "cpu"
) -> MemoryReport:
    """The memory of a completed program on one device.

    Args:
        assignment: a spec per value.
        name: of the program.
        donated: which of the graph's inputs are donated.
        platform: whose compiler orders the kernels, as for `sharding.memory.usage`.
    """
    return report(assignment, usage(assignment, donated, platform=platform), name=name)


def report(assignment: Assignment, found: Usage, *, name: str = "program") -> MemoryReport:
    """The same, of a program whose memory is known."""
    return MemoryReport(
        name=name,
        mesh=tuple(assignment.sizes.items()),
        argument_bytes=found.argument_bytes,
        result_bytes=found.result_bytes,
        temporary_bytes=found.temporary_bytes,
        arrays=Arrays(assignment, found).arrays(),
        timeline=tuple(_timeline(found, assignment.graph)),
    )


def _timeline(found: Usage, graph: Graph) -> Iterator[Moment]:
    base = found.argument_bytes + found.result_bytes
    for k, (step, num_bytes) in enumerate(zip(found.lifetimes.steps, found.lifetimes.timeline(), strict=True)):
        yield Moment(k, base + num_bytes, source(step.kernels[0].root, graph))


class Arrays:
    """The arrays that a program's memory holds; in all, those of the worst moment."""

    def __init__(self, assignment: Assignment, found: Usage):
        self.assignment, self.graph, self.usage = assignment, assignment.graph, found
        self.argument_kinds = kinds.of_arguments(self.graph, found)
        self.shapes = {
            tuple(sorted(self.graph.shapes[v]))
            for v, kind in zip(self.graph.inputs, self.argument_kinds, strict=True)
            if kind == "parameters" and self.graph.shapes[v]
        }

    def arrays(self) -> tuple[Array, ...]:
        found = [*self.arguments(), *self.results(), *self.alive(self.usage.lifetimes)]
        return tuple(sorted(found, key=lambda a: (-a.num_bytes, a.born, a.name)))

    def arguments(self) -> Iterator[Array]:
        end = len(self.usage.lifetimes.steps) - 1
        for x, kind in zip(self.usage.program.inputs, self.argument_kinds, strict=True):
            if x in self.usage.read:
                yield self.array(x, kind, x.num_bytes, 0, end, "", "")

    def results(self) -> Iterator[Array]:
        end = len(self.usage.lifetimes.steps) - 1
        outputs = self.usage.program.outputs
        for k, (x, v) in enumerate(zip(outputs, self.graph.outputs, strict=True)):
            table = POINTER_BYTES if len(outputs) > 1 else 0
            own = 0 if k in self.usage.aliases else x.num_bytes
            if own + table:
                yield self.array(x, "results", own + table, 0, end, x.name, "", value=v)

    def alive(self, lifetimes: Lifetimes) -> Iterator[Array]:
        """What is there when most is, and inside the loop or branch that makes it so."""
        timeline = lifetimes.timeline()
        if not timeline:
            return
        step = max(range(len(timeline)), key=timeline.__getitem__)
        phases = readers(lifetimes)
        for buffer in lifetimes.buffers:
            if buffer.is_own and buffer.born <= step <= buffer.dies:
                now = max(k for k, (born, _) in enumerate(buffer.makers) if born <= step)
                yield self.held(buffer, now, lifetimes, phases)
        inner = lifetimes.inside.get(step, ())
        if inner:
            yield from self.alive(max(inner, key=Lifetimes.peak_bytes))

    def held(
        self, buffer: Buffer, now: int, lifetimes: Lifetimes, phases: Mapping[Instruction, Collection[str]]
    ) -> Array:
        """One of the arrays that a buffer holds in turn, by its place among them."""
        born, x = buffer.makers[now]
        later = [m for _, m in buffer.makers[now + 1 :]] if x.name in ("broadcast", "copy") else []
        kind = kinds.of_array([x, *later], phases, self.shapes, self.graph)
        last = source(lifetimes.steps[buffer.dies].kernels[0].root, self.graph)
        return self.array(x, kind, buffer.num_bytes, born, buffer.dies, x.name, last)

    def array(
        self,
        x: Instruction,
        kind: Kind,
        num_bytes: int,
        born: int,
        dies: int,
        op: str,
        last: str,
        value: int | None = None,
    ) -> Array:
        v = x.value if value is None else value
        axes = self.axes(x, v)
        return Array(
            name=self.label(x, v),
            kind=kind,
            op=op,
            num_bytes=num_bytes,
            axes=axes,
            born=born,
            dies=dies,
            source=source(x, self.graph) if op else "",
            last_source=last,
            saved_bytes=self.saved(x, num_bytes, axes),
        )

    def label(self, x: Instruction, v: int | None) -> str:
        name = self.graph.first_names.get(v) if v is not None else None
        dtype = self.graph.dtypes[v] if v is not None else getattr(x.eqn and x.eqn.outvars[0].aval, "dtype", "")
        return name or f"{dtype}{list(x.shape)}"

    def axes(self, x: Instruction, v: int | None) -> tuple[str, ...]:
        """The axes that divide an array by its value's spec; a gathered copy is divided by none."""
        if v is None:
            return ()
        spec, sizes = self.assignment.specs[v], self.assignment.sizes
        shards = spec.num_shards(sizes)
        if math.prod(self.graph.shapes[v]) > x.num_elements * max(1, shards // 2) or shards == 1:
            return tuple(dict.fromkeys(axis_name(a).partition(":")[0] for axes in spec.axes for a in axes))
        return ()

    def saved(self, x: Instruction, num_bytes: int, axes: tuple[str, ...]) -> dict[str, int]:
        """What a split by each further axis would save."""
        sizes = self.assignment.sizes
        return {
            axis: num_bytes - num_bytes // size if any(n % size == 0 for n in x.shape) else 0
            for axis, size in sizes.items()
            if axis not in axes and size > 1
        }


def readers(lifetimes: Lifetimes) -> dict[Instruction, set[str]]:
    """Instruction -> the phases of a body in which its result is read."""
    found: dict[Instruction, set[str]] = {}
    for step in lifetimes.steps:
        for kernel in step.kernels:
            for operand in kernel.operands:
                found.setdefault(operand, set()).update(m.phase for m in kernel.members)
    return found


def source(x: Instruction, graph: Graph) -> str:
    """The user's line of an instruction; empty where JAX kept none."""
    line = compat.source_line(x.eqn) if x.eqn is not None else ""
    return line or (graph.source(x.value) if x.value is not None else "")


def _summed(rows: list) -> dict:
    """Key -> the sum of its bytes, most first; without keys of nothing."""
    total: dict = {}
    for key, num_bytes in rows:
        total[key] = total.get(key, 0) + num_bytes
    return {key: n for key, n in sorted(total.items(), key=lambda item: -item[1]) if n}


def _lines(report: MemoryReport) -> Iterator[str]:
    yield f"{report.name} on mesh {sizes_text(dict(report.mesh))}: {report.peak_bytes:,} bytes per device at the peak"
    yield from _table(("for", "bytes", "share"), [(k, n, n / report.peak_bytes) for k, n in report.by_class.items()])
    rows = [(axis, share.split_bytes, share.whole_bytes, share.saved_bytes) for axis, share in report.by_axis.items()]
    yield ""
    yield from _table(("axis", "bytes split by it", "not split by it", "splitting those saves"), rows)
    yield ""
    arrays = [
        (a.name, a.num_bytes, a.kind, a.op or "-", a.source or "-", f"{a.born} to {a.dies}") for a in report.top()
    ]
    yield from _table(("largest arrays", "bytes", "for", "made by", "at", "steps"), arrays)
    left = len(report.arrays) - len(arrays)
    if left > 0:
        yield f"and {left} more"


def _table(head: tuple[str, ...], rows: list[tuple]) -> list[str]:
    right = [k for k in range(len(head)) if rows and not isinstance(rows[0][k], str)]
    return aligned([head, *(tuple(map(_text, row)) for row in rows)], right=right)


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.1%}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
