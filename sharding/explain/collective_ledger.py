"""The communication ledger: every collective of a program, with its cause and source line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import jax.numpy as jnp

from ..cost import Kind, Repeated, by_kind, lower_collective
from ..display import Column, Table, Tabular
from ..display.text_table import aligned
from ..display.units import bytes_text
from ..hardware import Platform
from ..paths import Layers
from ..spec import Axis, axis_name
from ..xla.collective_lowering import is_slice_wide
from ..xla.collective_ops import totals


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
    is_manual: bool = False
    """Whether the program calls it explicitly, in a `shard_map`."""
    is_move: bool = False
    """Whether it reshards an array, because two ops, or an op and an annotation, need different specs."""

    @property
    def hint(self) -> str:
        """How to avoid it, with the annotations that it comes from; empty if unknown."""
        return self.advise()

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


class Ledger(Sequence[Collective], Tabular):
    """The collectives of a program, in program order; prints as a table, most bytes first."""

    def __init__(
        self,
        collectives: Sequence[Collective],
        *,
        name: str = "",
        on_platform: Callable[[Platform], Sequence[Collective]] | None = None,
        num_devices: int = 0,
        layers: Layers | None = None,
    ):
        self.name, self._num_devices, self._layers = name, num_devices, layers or Layers()
        self._collectives = tuple(collectives)
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

    def lowered(self, backend: Platform) -> Ledger:
        """The collectives as a backend lowers them.

        Other dtypes, all-reduces in place of reduce-scatters, and on GPUs and TPUs one reduction of several partial
        sums that are added.

        Args:
            backend: `"cpu"`, `"gpu"` or `"tpu"`.
        """
        own = self if self._on_platform is None else self._on_platform(backend)
        found = [_lowered(c, backend, is_slice_wide(c.num_devices, self._num_devices)) for c in own]
        return self._of(found)

    def _of(self, collectives: Sequence[Collective]) -> Ledger:
        return Ledger(collectives, name=self.name, num_devices=self._num_devices, layers=self._layers)

    def rows(self) -> list[tuple[str, str, int, int, str, str]]:
        """(kind, axes, count, bytes, line, cause), most bytes first; those of equal layers are in one row."""
        causes: dict[str, set[str]] = {}
        for c in self:
            causes.setdefault(self._layers.pattern(c.cause), set()).add(c.cause)
        keys = ((c.kind, ", ".join(map(axis_name, c.axes)), c.source, self._layers.pattern(c.cause)) for c in self)
        found = totals(zip(keys, self, strict=True))
        rows = [
            (kind, axes, n, size, source, next(iter(causes[text])) if len(causes[text]) == 1 else text)
            for (kind, axes, source, text), (n, size) in found.items()
        ]
        return sorted(rows, key=lambda row: -row[3])

    def tables(self) -> list[Table]:
        """One table, of the rows."""
        return [Table(self._title(), COLUMNS, self.rows())]

    def _title(self) -> str:
        counts = [
            f"{n} {kind}{'s' if n != 1 else ''} ({bytes_text(size)})" for kind, (n, size) in self.by_kind().items()
        ]
        return f"{self.name}, per device: {', '.join(counts) or 'no collectives'}"

    def __str__(self) -> str:
        table = [tuple(column.name for column in COLUMNS), *(tuple(map(str, row)) for row in self.rows())]
        return "\n".join([self._title(), *(aligned(table) if len(table) > 1 else [])])

    __repr__ = __str__


def _lowered(c: Collective, backend: Platform, spans_slice: bool) -> Collective:
    kind, dtype, size = lower_collective(
        backend, c.kind, c.dtype, c.result_bytes, is_manual=c.is_manual, spans_slice=spans_slice
    )
    return dataclasses.replace(c, kind=kind, dtype=dtype, result_bytes=size)
