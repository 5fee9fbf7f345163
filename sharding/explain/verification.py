"""Predicted collectives and peak memory compared with the compiled program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cost import KINDS, Kind, read_compiled
from ..display import Column, Table, Tabular
from ..display.text_table import aligned
from .collective_ledger import Ledger
from .memory_report import MemoryReport

COLUMNS = (
    Column(""),
    Column("predicted count", "number"),
    Column("compiled count", "number"),
    Column("predicted bytes", "bytes"),
    Column("compiled bytes", "bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Tabular):
    """Predicted and compiled figures of one program; prints as a table."""

    predicted: dict[Kind, tuple[int, int]]
    """Kind -> (number per call of the program, their bytes)."""
    compiled: dict[Kind, tuple[int, int]]
    predicted_peak_bytes: int
    compiled_peak_bytes: int

    @property
    def agrees(self) -> bool:
        """Whether kinds, counts and bytes of the collectives are equal; peak memory is not compared."""
        return self.predicted == self.compiled

    @property
    def peak_ratio(self) -> float:
        """Predicted over compiled peak memory."""
        return self.predicted_peak_bytes / max(1, self.compiled_peak_bytes)

    def tables(self) -> list[Table]:
        """Each kind of collectives and the peak memory: counts and bytes, predicted and compiled."""
        rows = []
        for kind in KINDS:
            found = self.predicted.get(kind), self.compiled.get(kind)
            if any(found):
                rows.append((kind, *((x or (0, 0))[k] for k in (0, 1) for x in found)))
        peaks = (self.predicted_peak_bytes, self.compiled_peak_bytes)
        title = "collectives as predicted" if self.agrees else "collectives other than predicted"
        return [Table(title, COLUMNS, [*rows, ("peak memory", None, None, *peaks)])]

    def __str__(self) -> str:
        table = [("", "predicted", "compiled")]
        for kind in KINDS:
            found = self.predicted.get(kind), self.compiled.get(kind)
            if any(found):
                table.append((kind, _text(found[0]), _text(found[1])))
        table.append(("peak memory", f"{self.predicted_peak_bytes} bytes", f"{self.compiled_peak_bytes} bytes"))
        return "\n".join(aligned(table))

    __repr__ = __str__


def verify(ledger: Ledger, report: MemoryReport, compiled: Any) -> Verification:
    """Compares a ledger, lowered for the backend, and a memory report with a compiled program."""
    facts = read_compiled(compiled)
    host = report.host.argument_bytes + report.host.result_bytes if report.platform == "cpu" else 0
    return Verification(
        predicted=ledger.by_kind(),
        compiled=facts.by_kind(),
        predicted_peak_bytes=report.peak_bytes + host,  # XLA:CPU counts both memories as one
        compiled_peak_bytes=facts.peak_bytes,
    )


def _text(found: tuple[int, int] | None) -> str:
    return "none" if found is None else f"{found[0]} ({found[1]} bytes)"
