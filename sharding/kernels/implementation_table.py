"""Which implementation of each operation `"auto"` takes, and why: a table of the candidates themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..display import text_table
from .implementation import XLA, Candidate


class Row(NamedTuple):
    """An implementation of an operation."""

    operation: str
    """A function of `sharding.kernels`."""
    implementation: str
    platforms: tuple[str, ...]
    """Where `"auto"` takes it, unless it can't run what one before it can't either."""
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class ImplementationTable:
    """Rows by operation, in the order in which `"auto"` tries them; prints as a table."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        head = "operation", "implementation", '"auto" on', "why"
        cells = [(row.operation, row.implementation, " ".join(row.platforms) or "none", row.why) for row in self.rows]
        return "\n".join(text_table.ruled([head, *cells]))


def implementations() -> ImplementationTable:
    """Returns the implementations of all operations: where `"auto"` takes each, and why.

    Example:
        >>> from sharding import kernels
        >>> for row in kernels.implementations():
        ...     if row.operation == "rotary":
        ...         print(row.implementation, row.platforms)
        mosaic_tpu ('tpu',)
        mosaic_gpu ()
        xla ('cpu', 'gpu')
    """
    room = importlib.import_module(__name__.rpartition(".")[0])
    rows = []
    for operation in room.__all__:
        module = sys.modules[getattr(room, operation).__module__]
        listed: tuple[Candidate, ...] = getattr(module, "IMPLEMENTATIONS", ())
        rows += [Row(operation, one.name, tuple(sorted(one.platforms)), one.why) for one in listed]
        rest = {"cpu", "gpu", "tpu"}.difference(*(one.platforms for one in listed))
        rows += [Row(operation, XLA, tuple(sorted(rest)), "the reference, in plain JAX")] if listed else []
    return ImplementationTable(tuple(rows))
