"""The communication ledger: every collective of a program, with its cause and source line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import jax.numpy as jnp

from ..cost import Kind, Repeated, by_kind, lower_collective
from ..display import Column, Table, Tabular
from ..display.text_table import aligned
from ..display.units import bytes_text
from ..graph import Loop
from ..hardware import Chip, Platform
from ..paths import Layers
from ..spec import Axis, axis_name
from ..xla.collective_lowering import is_gathered_by_sum, is_slice_wide
from ..xla.collective_ops import totals
from .host_copies import DIRECTIONS, HostCopy
from .unknown_ops import UnknownOp, UnknownOps


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Repeated):
    """One collective of a program, as one device runs it."""

    axes: tuple[Axis, ...]
    """The mesh axes that it communicates over."""
    op: str
    """The op that needs it."""
    source: str
    """The user's line of that op, `file.py:line (function)`; empty if unknown."""
    cause: str
    """Why it is needed."""
    advise: Callable[[], str] = field(default=str, repr=False, compare=False)
    """Computes the hint on demand."""
    loops: tuple[str, ...] = ()
    """The lines of the enclosing loops of unknown length, of which it is counted for one iteration."""
    is_manual: bool = False
    """Whether the program calls it explicitly, in a `shard_map`."""
    is_move: bool = False
    """Whether it reshards an array, because two ops, or an op and an annotation, need different specs."""

    @property
    def hint(self) -> str:
        """How to avoid it, with the annotations that it comes from; empty if unknown."""
        return self.advise()

    def in_loops(self, loops: Iterable[Loop]) -> Collective:
        """The same in loops of unknown length."""
        lines = tuple(dict.fromkeys(loop.source for loop in loops))
        if not lines:
            return self
        at = ", ".join(f"at {source}" for source in lines if source) or "of unknown length"
        return dataclasses.replace(self, loops=lines, cause=f"{self.cause}, per iteration of the loop {at}")

    def in_dtype(self, dtype: str) -> Collective:
        """The same of an array that was converted to another dtype."""
        old, new = (jnp.dtype(name).itemsize for name in (self.dtype, dtype))
        return dataclasses.replace(self, dtype=dtype, result_bytes=self.result_bytes * new // old)

    def __str__(self) -> str:
        axes = ", ".join(map(axis_name, self.axes))
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{self.kind} over {axes}, {times}{self.result_bytes} bytes of {self.dtype}: {self.cause}, {self.source}"


COLUMNS = (
    Column("kind"),
    Column("axes"),
    Column("count", "number"),
    Column("bytes", "bytes"),
    Column("line", "code"),
    Column("cause"),
)
HOST_COLUMNS = (Column("copy"), Column("count", "number"), Column("bytes", "bytes"), Column("line", "code"))


class Ledger(Sequence[Collective], Tabular):
    """The collectives of a program, in program order; prints as a table, most bytes first.

    `unknown` lists the ops without a rule; what those move that are left to XLA is not in the table. `host_copies` are
    the copies between a device and the memory of its host, in a table of their own; they are not among the collectives.
    """

    def __init__(
        self,
        collectives: Sequence[Collective],
        *,
        name: str = "",
        on_platform: Callable[[Platform], Sequence[Collective]] | None = None,
        num_devices: int = 0,
        layers: Layers | None = None,
        unknown: Sequence[UnknownOp] = (),
        find_cut_searches: Callable[[], tuple[str, ...]] = tuple,
        host_copies: Sequence[HostCopy] = (),
    ):
        self.name, self._num_devices, self._layers = name, num_devices, layers or Layers()
        self.unknown, self._find_cut_searches = UnknownOps(unknown), find_cut_searches
        self._collectives, self.host_copies = tuple(collectives), tuple(host_copies)
        self._on_platform = on_platform

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> Ledger: ...
    def __getitem__(self, index: int | slice) -> Collective | Ledger:
        found = self._collectives[index]
        return found if isinstance(found, Collective) else self._of(found)

    def __len__(self) -> int:
        return len(self._collectives)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self._collectives)

    def by_kind(self) -> dict[Kind, tuple[int, int]]:
        """Kind -> (number per call of the program, their bytes)."""
        return by_kind(self)

    @property
    def total_bytes(self) -> int:
        """Bytes of all collectives."""
        return sum(c.bytes for c in self)

    @property
    def total_wire_bytes(self) -> int:
        """Bytes that each device sends in all collectives."""
        return sum(c.wire_bytes for c in self)

    def lowered(self, backend: Platform | Chip) -> Ledger:
        """The collectives as a backend lowers them.

        Other dtypes, all-reduces in place of reduce-scatters, and on GPUs and TPUs one reduction of several partial
        sums that are added.

        Args:
            backend: `"cpu"`, `"gpu"` or `"tpu"`, or the chip: the compiler of some treats collectives over all devices
                of a torus in its own way.
        """
        platform, torus_dims = (backend, 0) if isinstance(backend, str) else (backend.platform, backend.torus_dims)
        own = self if self._on_platform is None else self._on_platform(platform)
        return self._of([self._lowered(c, platform, torus_dims) for c in own])

    def _lowered(self, c: Collective, platform: Platform, torus_dims: int) -> Collective:
        kind, dtype, size = lower_collective(
            platform,
            c.kind,
            c.dtype,
            c.result_bytes,
            is_manual=c.is_manual,
            spans_slice=is_slice_wide(c.num_devices, self._num_devices),
            gathers_by_sum=is_gathered_by_sum(c.num_devices, self._num_devices, torus_dims, c.result_bytes),
        )
        return dataclasses.replace(c, kind=kind, dtype=dtype, result_bytes=size)

    def _of(self, collectives: Sequence[Collective]) -> Ledger:
        return Ledger(
            collectives,
            name=self.name,
            num_devices=self._num_devices,
            layers=self._layers,
            unknown=self.unknown,
            find_cut_searches=self._find_cut_searches,
            host_copies=self.host_copies,
        )

    @property
    def cut_searches(self) -> tuple[str, ...]:
        """The ops for which not all ways to run or reshard them were compared, with their lines."""
        return self._find_cut_searches()

    def rows(self) -> list[tuple[str, str, int, int, str, str]]:
        """(kind, axes, count, bytes, line, cause), most bytes first; those of equal layers are in one row."""
        keys = [(c.kind, ", ".join(map(axis_name, c.axes)), c.source, self._layers.pattern(c.cause)) for c in self]
        causes: dict[tuple[str, ...], set[str]] = {}
        for key, c in zip(keys, self, strict=True):
            causes.setdefault(key, set()).add(c.cause)
        rows = [
            (kind, axes, n, size, source, own.pop() if len(own) == 1 else text)
            for (kind, axes, source, text), (n, size) in totals(zip(keys, self, strict=True)).items()
            for own in [causes[kind, axes, source, text]]
        ]
        return sorted(rows, key=lambda row: -row[3])

    def tables(self) -> list[Table]:
        """The collectives; then the copies to and from the host, if any, those of one line in one row."""
        collectives = Table(self._title(), COLUMNS, self.rows())
        return [collectives, self._host_table()] if self.host_copies else [collectives]

    def _host_table(self) -> Table:
        rows: dict[tuple[str, str], tuple[int, int]] = {}
        for c in self.host_copies:
            count, size = rows.get((c.direction, c.source), (0, 0))
            rows[c.direction, c.source] = count + c.count, size + c.bytes
        found = [(kind, count, size, source) for (kind, source), (count, size) in rows.items()]
        sums = (f"{bytes_text(sum(c.bytes for c in self.host_copies if c.direction == d))} {d}" for d in DIRECTIONS)
        return Table(f"copies, per device: {', '.join(sums)}", HOST_COLUMNS, sorted(found, key=lambda row: -row[2]))

    def _title(self) -> str:
        counts = [
            f"{n} {kind}{'s' if n != 1 else ''} ({bytes_text(size)})" for kind, (n, size) in self.by_kind().items()
        ]
        size = sum(c.bytes for c in self if c.loops)
        per_iteration = f" ({bytes_text(size)} per iteration of loops of unknown length: with_trips)" if size else ""
        return f"{self.name}, per device: {', '.join(counts) or 'no collectives'}{per_iteration}"

    def notes(self) -> list[str]:
        """What is not predicted, and for which ops not all ways to run them were compared."""
        rest = UnknownOps(one for one in self.unknown if not one.is_predicted)
        found = [f"not predicted: {line}" for line in str(rest).splitlines()]
        return found + [f"search cut short: {line}" for line in self.cut_searches]

    def __str__(self) -> str:
        table = [tuple(column.name for column in COLUMNS), *(tuple(map(str, row)) for row in self.rows())]
        lines = [self._title(), *(aligned(table) if len(table) > 1 else [])]
        host = ["", *str(self._host_table()).splitlines()] if self.host_copies else []
        return "\n".join([*lines, *host, *self.notes()])

    __repr__ = __str__
