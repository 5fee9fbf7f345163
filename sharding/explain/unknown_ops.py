"""Ops without a sharding rule: what is gathered for them, and which of them decide by themselves how they run."""

from __future__ import annotations

from dataclasses import dataclass

from ..display import Column, Table, Tabular
from ..display.units import bytes_text
from ..propagation import Assignment
from ..rewrite.op_strategy import OpStrategies
from .collective_hints import unknown_op_fix


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownOp:
    """An op without a sharding rule.

    It runs on replicated arrays, so that its sharded operands are all-gathered, as the ledger lists. A
    `custom_partitioning` without one is left to XLA instead: what it moves is not predicted.
    """

    op: str
    """Its primitive."""
    source: str
    """The user's line, `file.py:line (function)`; empty if unknown."""
    gathered: tuple[str, ...]
    """Its sharded operands, each as `name [spec]`."""
    num_bytes: int
    """Bytes per device that these have when they are replicated, in one run."""
    count: int
    """Number of runs per call of the program."""
    is_predicted: bool
    """Whether the ledger has its all-gathers."""
    fix: str
    """How to avoid gathering them."""

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        times = f"{self.count} x " if self.count > 1 else ""
        if not self.gathered:
            return f"{self.op}{at}: no sharded operands"
        what = "gathers" if self.is_predicted else "may gather"
        return f"{self.op}{at}: {what} {', '.join(self.gathered)}, {times}{bytes_text(self.num_bytes)} per device"


COLUMNS = (
    Column("op"),
    Column("line", "code"),
    Column("gathers", "code"),
    Column("runs", "number"),
    Column("bytes", "bytes"),
    Column("instead"),
)


class UnknownOps(tuple[UnknownOp, ...], Tabular):
    """Ops without a rule in program order; prints one per line, equal ones once."""

    __slots__ = ()

    def tables(self) -> list[Table]:
        """One table; bytes are per device and run."""
        rows = [(one.op, one.source, ", ".join(one.gathered), one.count, one.num_bytes, one.fix) for one in self]
        return [Table(f"{len(rows)} ops without a rule", COLUMNS, rows)]

    def __str__(self) -> str:
        lines = [str(one) for one in self]
        return "\n".join(f"{t} (x{n})" if (n := lines.count(t)) > 1 else t for t in dict.fromkeys(lines))

    __repr__ = __str__


def unknown_ops(assignment: Assignment) -> UnknownOps:
    """The ops without a rule that a program runs."""
    graph, specs, strategies = assignment.graph, assignment.specs, OpStrategies.shared(assignment)
    live = graph.live_values
    found = []
    for op in graph.unknown_ops:
        if not graph.is_live(op, live):
            continue
        if op.rule is not None:
            wanted = strategies.of(op).operand_specs
            gathered = [v for v, spec in zip(op.operands, wanted, strict=True) if specs[v].axes != spec.axes]
        else:
            gathered = [v for v in op.operands if any(specs[v].axes)]
        gathered = list(dict.fromkeys(gathered))
        found.append(
            UnknownOp(
                op=op.name,
                source=op.source,
                gathered=tuple(f"{graph.label(v)} {specs[v]}" for v in gathered),
                num_bytes=sum(map(graph.num_bytes, gathered)),
                count=op.times,
                is_predicted=op.rule is not None,
                fix=unknown_op_fix(op),
            )
        )
    return UnknownOps(found)
