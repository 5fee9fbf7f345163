"""Searches for the cheapest way to run an op that were cut short, so that there may be a cheaper one."""

from __future__ import annotations

from ..graph import Op
from ..propagation import Assignment
from ..rewrite.executed_assignment import executed
from ..rewrite.op_strategy import MAX_CANDIDATES, OpStrategies
from ..rewrite.reshard import is_cut_short
from ..spec import Spec


def cut_searches(assignment: Assignment) -> tuple[str, ...]:
    """One line per line of the program whose ops have more strategies or reshards than are compared."""
    assignment = executed(assignment)
    graph, sizes, strategies = assignment.graph, assignment.sizes, OpStrategies.shared(assignment)
    live = graph.live_values
    found = []
    for op in graph.ops:
        if op.rule is None or op.name == "edge" or not (op.operands or op.results) or not graph.is_live(op, live):
            continue
        strategy = strategies.of(op)
        if strategy.is_cut_short:
            found.append(f"{_where(op)}: {MAX_CANDIDATES} strategies compared, of more")
        moves: list[tuple[int, Spec, Spec]] = [
            *((v, strategies.specs[v], need) for v, need in zip(op.operands, strategy.operand_specs, strict=True)),
            *((v, have, strategies.specs[v]) for v, have in zip(op.results, strategy.result_specs, strict=True)),
        ]
        for v, have, want in moves:
            if is_cut_short(have, want, graph.shapes[v], graph.itemsize(v), sizes):
                found.append(f"{_where(op)}: not every reshard of {graph.label(v)} compared")
    return tuple(dict.fromkeys(found))


def _where(op: Op) -> str:
    return f"{op.name} at {op.source}" if op.source else op.name
