"""The memory report: peak memory of a device by category, source line and mesh axis, before anything compiles.

The bytes are predicted by `sharding/memory`, which models the partitioned program: fusion, the schedule, and buffer
reuse. The tests compare them with the compiler's `memory_analysis()`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..display import Column, Table, Tabular
from ..display.units import bytes_text
from ..graph import Graph
from ..hardware import Platform
from ..memory import Usage, usage
from ..paths import Layers
from ..propagation import Assignment
from ..spec import sizes_text
from .array_categories import Category
from .collective_buffers import collective_buffer_bytes
from .host_bytes import HostBytes, host_bytes
from .live_arrays import Array, LiveArrays, source
from .memory_fit import Fit, fit
from .offload_policies import unmoved_names
from .peak_error import PEAK_ERRORS, PeakError

ARGUMENTS = "(arguments)"
GAPS = "(gaps)"
"""Fragmentation: freed space that the next array does not fit into."""
MAX_ARRAYS = 10
"""Rows of arrays in the printed report."""
ARRAY_COLUMNS = (
    Column("largest arrays", "code"),
    Column("bytes", "bytes"),
    Column("category"),
    Column("op", "code"),
    Column("line", "code"),
    Column("sharded over"),
)
CATEGORY_COLUMNS = (Column("category"), Column("bytes", "bytes"), Column("share", "share"))
AXIS_COLUMNS = (
    Column("axis"),
    Column("bytes sharded over it", "bytes"),
    Column("not sharded over it", "bytes"),
    Column("saved by sharding those", "bytes"),
)
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
class MemoryReport(Tabular):
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
    host: HostBytes = HostBytes()
    """Arrays in the host's memory (`memory_kind="pinned_host"`), which are not in `peak_bytes`."""
    unmoved: tuple[str, ...] = ()
    """Names that a `jax.checkpoint` policy offloads and JAX leaves on the device, with the reason."""
    arrays: tuple[Array, ...]
    """Arrays live at the peak, largest first."""
    layers: Layers = Layers()
    """The equal layers among the names of the arrays."""
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

    def grouped(self) -> list[tuple[str, list[Array]]]:
        """The arrays at the peak, those of equal layers together: (merged name, arrays), most bytes first."""
        rows = [(a.name, a.num_bytes, a.kind, a.op, a.source, a.axes) for a in self.arrays]
        found = [(name, [self.arrays[k] for k in members]) for name, members in self.layers.merged(rows)]
        return sorted(found, key=lambda item: -sum(a.num_bytes for a in item[1]))

    def tables(self) -> list[Table]:
        """The arrays at the peak, those of equal layers in one row; then the bytes by category, and by mesh axis."""
        arrays = [
            (name, sum(a.num_bytes for a in own), own[0].kind, own[0].op, own[0].source, ", ".join(own[0].axes))
            for name, own in self.grouped()
        ]
        categories = [(kind, n, n / max(1, self.peak_bytes)) for kind, n in self.by_class.items()]
        axes = [
            (axis, s.split_bytes, s.whole_bytes, s.saved_bytes) for axis, s in self.by_axis.items() if s.num_devices > 1
        ]
        return [
            Table("arrays live at the peak", ARRAY_COLUMNS, arrays),
            Table(self._title(), CATEGORY_COLUMNS, categories),
            Table("", AXIS_COLUMNS, axes),
        ]

    def _title(self) -> str:
        peak = f"{bytes_text(self.peak_bytes)} per device ({self.peak_bytes:,} bytes)"
        return f"{self.name} on mesh {sizes_text(dict(self.mesh))}: peak memory {peak}"

    def notes(self) -> list[str]:
        """The error of predicted peaks, the memory elsewhere, and what could not be moved to the host."""
        error, (low, high) = self.peak_error, self.range_bytes
        found = [
            f"predicted for XLA:{self.platform.upper()}; of other people's programs half were within "
            f"{error.median:.0%}, nine of ten within {error.large:.0%}"
        ]
        if max(1 - error.low, error.high - 1) > WIDE:
            found.append(f"compiled, nine of ten such programs take {bytes_text(low)} to {bytes_text(high)}")
        if self.collective_buffer_bytes:
            found.append(f"outside XLA's memory: {bytes_text(self.collective_buffer_bytes)} for NCCL's buffers")
        if self.host.total_bytes:
            found.append(f"in the host's memory: {_host_text(self.host)} per device")
        return [*found, *(f"not offloaded: {line}" for line in self.unmoved)]

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
        host=host_bytes(assignment, found),
        unmoved=unmoved_names(assignment.graph),
        collective_buffer_bytes=collective_buffer_bytes(found, assignment.sizes, platform),
        arrays=LiveArrays(assignment, found).arrays(),
        layers=assignment.graph.layers,
        timeline=tuple(_timeline(found, assignment.graph)),
    )


def _timeline(found: Usage, graph: Graph) -> Iterator[Moment]:
    base = found.argument_bytes + found.result_bytes
    for k, (step, num_bytes) in enumerate(zip(found.lifetimes.steps, found.lifetimes.timeline(), strict=True)):
        yield Moment(k, base + num_bytes, source(step.kernels[0].root, graph))


def _summed(rows: list) -> dict:
    """Key -> the sum of its bytes, most first; without zero sums."""
    total: dict = {}
    for key, num_bytes in rows:
        total[key] = total.get(key, 0) + num_bytes
    return {key: n for key, n in sorted(total.items(), key=lambda item: -item[1]) if n}


def _lines(report: MemoryReport) -> Iterator[str]:
    arrays, categories, axes = report.tables()
    yield report._title()
    yield from report.notes()
    yield from categories.lines()
    for table in (axes, Table("", ARRAY_COLUMNS, arrays.rows[:MAX_ARRAYS])):
        yield from ("", *table.lines())
    left = len(arrays.rows) - MAX_ARRAYS
    if left > 0:
        yield f"and {left} more"


def _host_text(host: HostBytes) -> str:
    parts = {"arguments": host.argument_bytes, "results": host.result_bytes, "temporaries": host.temporary_bytes}
    return f"{bytes_text(host.total_bytes)} ({', '.join(f'{bytes_text(n)} of {k}' for k, n in parts.items() if n)})"
