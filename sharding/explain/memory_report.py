"""The memory report: peak memory of a device by category, source line and mesh axis, before anything compiles.

The bytes are predicted by `sharding/memory`, which models the partitioned program: fusion, the schedule, and buffer
reuse. The tests compare them with the compiler's `memory_analysis()`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .. import compat
from ..graph import Graph
from ..hardware import Platform
from ..memory import POINTER_BYTES, Usage, usage
from ..memory.instruction import Instruction
from ..memory.liveness import Buffer, Lifetimes
from ..propagation import Assignment
from ..spec import axis_name, sizes_text
from ..text_table import aligned
from . import array_categories
from .array_categories import Category
from .collective_buffers import collective_buffer_bytes
from .memory_fit import Fit, fit
from .peak_error import PEAK_ERRORS, PeakError
from .units import bytes_text

ARGUMENTS = "(arguments)"
GAPS = "(gaps)"
"""Fragmentation: freed space that the next array does not fit into."""
WIDE = 0.2
"""A predicted peak that is farther from some compiled ones is shown as a range."""


class Moment(NamedTuple):
    """One step of the program's schedule."""

    step: int
    num_bytes: int
    """Live bytes per device at that step, without gaps."""
    source: str
    """The user's line; empty where JAX recorded none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array that is live at the peak."""

    name: str
    """Its path or annotated name; for an unnamed array its local type, as `float32[2, 16]`."""
    kind: Category
    op: str
    """The primitive or collective that produces it; empty for arguments."""
    num_bytes: int
    """Per device."""
    axes: tuple[str, ...]
    """The mesh axes that it is sharded over."""
    born: int
    """The step that produces it."""
    dies: int
    """The last step that reads it."""
    source: str
    """The user's line that produces it; empty for arguments."""
    last_source: str
    """The user's line that reads it last."""
    saved_bytes: Mapping[str, int]
    """Mesh axis that it is not sharded over -> bytes per device that sharding it would save; 0 if no dim divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisShare:
    """Peak memory with respect to one mesh axis, in bytes per device."""

    axis: str
    num_devices: int
    split_bytes: int
    """Arrays sharded over the axis."""
    whole_bytes: int
    """Arrays replicated along the axis."""
    saved_bytes: int
    """Savings if every array of `whole_bytes` with a divisible dim were sharded over the axis."""

    @property
    def twice_as_long_saves(self) -> int:
        """Savings from doubling the axis, with the current shardings."""
        return self.split_bytes // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The memory of one device over one call of a program, in bytes; prints as a table."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    platform: Platform
    """The platform whose compiler is modelled."""
    argument_bytes: int
    """Arguments of the compiled program: live throughout."""
    result_bytes: int
    """Results that are not aliased to donated arguments."""
    temporary_bytes: int
    """The temporary buffer for everything else, including gaps."""
    collective_buffer_bytes: int = 0
    """What NCCL keeps for the collectives on GPUs, outside XLA's memory and not in `peak_bytes`."""
    arrays: tuple[Array, ...]
    """Arrays live at the peak, largest first."""
    timeline: tuple[Moment, ...]
    """Every step; a loop or branch is one step, with the peak inside it."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory: arguments, results and temporaries."""
        return self.argument_bytes + self.result_bytes + self.temporary_bytes

    @property
    def peak_error(self) -> PeakError:
        """How far such predictions are from compiled peaks, over programs that other people wrote."""
        return PEAK_ERRORS[self.platform]

    @property
    def range_bytes(self) -> tuple[int, int]:
        """Where the compiled peak lies for nine of ten programs with this predicted peak."""
        return int(self.peak_bytes * self.peak_error.low), int(self.peak_bytes * self.peak_error.high)

    @property
    def gap_bytes(self) -> int:
        """Bytes lost to fragmentation at the peak."""
        return self.peak_bytes - sum(a.num_bytes for a in self.arrays)

    @property
    def by_class(self) -> dict[Category, int]:
        """Category -> bytes at the peak, most first; includes gaps, so that the sum is `peak_bytes`.

        The rules are in `sharding/explain/array_categories.py`.
        """
        return _summed([(a.kind, a.num_bytes) for a in self.arrays] + [("gaps", self.gap_bytes)])

    @property
    def by_source(self) -> dict[str, int]:
        """The user's line that produces an array -> bytes at the peak, most first."""
        rows = [(a.source if a.op else ARGUMENTS, a.num_bytes) for a in self.arrays]
        return _summed([*rows, (GAPS, self.gap_bytes)])

    @property
    def by_axis(self) -> dict[str, AxisShare]:
        """Mesh axis -> bytes at the peak that are sharded over it, that are not, and what sharding those would save."""
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

    def fits(self, chip: str, *, usable: float | None = None) -> Fit:
        """Whether the peak fits the memory that a chip offers beside NCCL's buffers; truthy if it does.

        Args:
            chip: such as `"h100"` or `"v5p"`; see `sharding.hardware`.
            usable: the share of the memory that programs may use, such as what `XLA_CLIENT_MEM_FRACTION` sets. Default:
                what JAX and the chip's runtime leave: 75 % on GPUs.

        Raises:
            ShardingError: an unknown chip, one that uses the host's memory, or a share that is none.
        """
        outside = self.collective_buffer_bytes
        return fit(self.peak_bytes, chip, usable=usable, range_bytes=self.range_bytes, outside_bytes=outside)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__


def memory(
    assignment: Assignment, *, name: str = "program", donated: Collection[int] = (), platform: Platform = "cpu"
) -> MemoryReport:
    """The memory of a completed program on one device.

    Args:
        assignment: a spec per value.
        name: the program's name.
        donated: indices of the donated inputs of the graph.
        platform: the backend whose schedule is predicted, as for `sharding.memory.usage`.
    """
    return report(assignment, usage(assignment, donated, platform=platform), name=name, platform=platform)


def report(assignment: Assignment, found: Usage, *, name: str = "program", platform: Platform = "cpu") -> MemoryReport:
    """The memory report of a completed program, from its memory usage on a platform."""
    return MemoryReport(
        name=name,
        platform=platform,
        mesh=tuple(assignment.sizes.items()),
        argument_bytes=found.argument_bytes,
        result_bytes=found.result_bytes,
        temporary_bytes=found.temporary_bytes,
        collective_buffer_bytes=collective_buffer_bytes(found, assignment.sizes, platform),
        arrays=LiveArrays(assignment, found).arrays(),
        timeline=tuple(_timeline(found, assignment.graph)),
    )


def _timeline(found: Usage, graph: Graph) -> Iterator[Moment]:
    base = found.argument_bytes + found.result_bytes
    for k, (step, num_bytes) in enumerate(zip(found.lifetimes.steps, found.lifetimes.timeline(), strict=True)):
        yield Moment(k, base + num_bytes, source(step.kernels[0].root, graph))


class LiveArrays:
    """The arrays in a program's memory: arguments, results, and the buffers that are live at the peak."""

    def __init__(self, assignment: Assignment, found: Usage):
        self.assignment, self.graph, self.usage = assignment, assignment.graph, found
        self.argument_kinds = array_categories.of_arguments(self.graph, found)
        self.shapes = {
            tuple(sorted(self.graph.shapes[v]))
            for v, kind in zip(self.graph.inputs, self.argument_kinds, strict=True)
            if kind == "parameters" and self.graph.shapes[v]
        }

    def arrays(self) -> tuple[Array, ...]:
        found = [*self.arguments(), *self.results(), *self.live_at_peak(self.usage.lifetimes)]
        return tuple(sorted(found, key=lambda a: (-a.num_bytes, a.born, a.name)))

    def arguments(self) -> Iterator[Array]:
        end = len(self.usage.lifetimes.steps) - 1
        for x, kind in zip(self.usage.program.inputs, self.argument_kinds, strict=True):
            if x in self.usage.program.kept:
                yield self.array(x, kind, x.num_bytes, 0, end, "", "")

    def results(self) -> Iterator[Array]:
        end = len(self.usage.lifetimes.steps) - 1
        outputs = self.usage.program.outputs
        for k, (x, v) in enumerate(zip(outputs, self.graph.outputs, strict=True)):
            table = POINTER_BYTES if len(outputs) > 1 else 0
            own = 0 if k in self.usage.aliases else x.num_bytes
            if own + table:
                yield self.array(x, "results", own + table, 0, end, x.name, "", value=v)

    def live_at_peak(self, lifetimes: Lifetimes) -> Iterator[Array]:
        """The buffers live at the peak of a body, and recursively in the loop or branch that runs then."""
        timeline = lifetimes.timeline()
        if not timeline:
            return
        step = max(range(len(timeline)), key=timeline.__getitem__)
        phases = readers(lifetimes)
        for buffer in lifetimes.buffers:
            if buffer.is_temporary and buffer.born <= step <= buffer.dies:
                now = max(k for k, (born, _) in enumerate(buffer.makers) if born <= step)
                yield self.buffer_array(buffer, now, lifetimes, phases)
        inner = lifetimes.nested.get(step, ())
        if inner:
            yield from self.live_at_peak(max(inner, key=Lifetimes.peak_bytes))

    def buffer_array(
        self, buffer: Buffer, now: int, lifetimes: Lifetimes, phases: Mapping[Instruction, Collection[str]]
    ) -> Array:
        """The array with index `now` among those that a buffer holds in turn."""
        born, x = buffer.makers[now]
        later = [m for _, m in buffer.makers[now + 1 :]] if x.name in ("broadcast", "copy") else []
        kind = array_categories.of_array([x, *later], phases, self.shapes, self.graph)
        last = source(lifetimes.steps[buffer.dies].kernels[0].root, self.graph)
        return self.array(x, kind, buffer.num_bytes, born, buffer.dies, x.name, last)

    def array(
        self,
        x: Instruction,
        kind: Category,
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
        """The axes that an array is sharded over by its value's spec; none for an all-gathered copy."""
        if v is None:
            return ()
        spec, sizes = self.assignment.specs[v], self.assignment.sizes
        shards = spec.num_shards(sizes)
        if math.prod(self.graph.shapes[v]) > x.num_elements * max(1, shards // 2) or shards == 1:
            return tuple(dict.fromkeys(axis_name(a).partition(":")[0] for axes in spec.axes for a in axes))
        return ()

    def saved(self, x: Instruction, num_bytes: int, axes: tuple[str, ...]) -> dict[str, int]:
        """Bytes that sharding over each further axis would save."""
        sizes = self.assignment.sizes
        return {
            axis: num_bytes - num_bytes // size if any(n % size == 0 for n in x.shape) else 0
            for axis, size in sizes.items()
            if axis not in axes and size > 1
        }


def readers(lifetimes: Lifetimes) -> dict[Instruction, set[str]]:
    """Instruction -> the phases of a body that read its result."""
    found: dict[Instruction, set[str]] = {}
    for step in lifetimes.steps:
        for kernel in step.kernels:
            for operand in kernel.operands:
                found.setdefault(operand, set()).update(m.phase for m in kernel.members)
    return found


def source(x: Instruction, graph: Graph) -> str:
    """The user's line of an instruction; empty where JAX recorded none."""
    line = compat.source_line(x.eqn) if x.eqn is not None else ""
    return line or (graph.source(x.value) if x.value is not None else "")


def _summed(rows: list) -> dict:
    """Key -> the sum of its bytes, most first; without zero sums."""
    total: dict = {}
    for key, num_bytes in rows:
        total[key] = total.get(key, 0) + num_bytes
    return {key: n for key, n in sorted(total.items(), key=lambda item: -item[1]) if n}


def _lines(report: MemoryReport) -> Iterator[str]:
    peak = f"{bytes_text(report.peak_bytes)} per device ({report.peak_bytes:,} bytes)"
    yield f"{report.name} on mesh {sizes_text(dict(report.mesh))}: peak memory {peak}"
    error, (low, high) = report.peak_error, report.range_bytes
    yield (
        f"predicted for XLA:{report.platform.upper()}; of other people's programs half were within {error.median:.0%}, "
        f"nine of ten within {error.large:.0%}"
    )
    if max(1 - error.low, error.high - 1) > WIDE:
        yield f"compiled, nine of ten such programs take {bytes_text(low)} to {bytes_text(high)}"
    if report.collective_buffer_bytes:
        yield f"outside XLA's memory: {bytes_text(report.collective_buffer_bytes)} for NCCL's buffers"
    rows = [(k, n, n / report.peak_bytes) for k, n in report.by_class.items()]
    yield from _table(("category", "bytes", "share"), rows)
    rows = [(axis, share.split_bytes, share.whole_bytes, share.saved_bytes) for axis, share in report.by_axis.items()]
    yield ""
    yield from _table(("axis", "bytes sharded over it", "not sharded over it", "saved by sharding those"), rows)
    yield ""
    arrays = [
        (a.name, a.num_bytes, a.kind, a.op or "-", a.source or "-", f"{a.born} to {a.dies}") for a in report.top()
    ]
    yield from _table(("largest arrays", "bytes", "category", "op", "line", "live steps"), arrays)
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
