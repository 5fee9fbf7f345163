"""How often, and in which loops, an array is resharded for an op: a loop invariant before the loop."""

from __future__ import annotations

from collections.abc import Iterable

from .. import compat
from ..graph import Graph, Loop, Op
from ..hardware import Platform
from ..rewrite.invariant_reshards import enters_loop

LEAVES_ALL_LOOPS: frozenset[Platform] = frozenset({"cpu"})
"""Platforms whose compiler moves an invariant out of all of nested loops; the others do out of the innermost."""


def times_moved(graph: Graph, op: Op, v: int, platform: Platform | None = None) -> int:
    """How often an operand is resharded: a loop invariant before its loop."""
    return graph.loop_invariants[before_loops(graph, op, v, platform)] if is_moved_outside(graph, op, v) else op.times


def loops_moved(graph: Graph, op: Op, v: int, platform: Platform | None = None) -> Iterable[Loop]:
    """The loops of unknown length in which an array of an op is resharded."""
    maker = graph.makers.get(v)
    if maker is None or op.name == "edge":
        return op.loops if maker is None else maker.loops
    return graph.makers[before_loops(graph, op, v, platform)].loops if is_moved_outside(graph, op, v) else op.loops


def is_moved_outside(graph: Graph, op: Op, v: int) -> bool:
    """Whether an operand is a loop invariant, and not behind the barrier of a recomputation in the loop."""
    if v not in graph.loop_invariants:
        return False
    around_loop = graph.makers[v].site[1:]
    return not any(map(compat.is_recomputed, op.site[1 : len(op.site) - len(around_loop)]))


def before_loops(graph: Graph, op: Op, v: int, platform: Platform | None) -> int:
    """A loop invariant that an op reads, as it enters the outermost loop out of which a compiler moves its reshard."""
    edge = graph.makers[v]
    while platform in LEAVES_ALL_LOOPS and enters_loop(edge) and is_moved_outside(graph, edge, edge.operands[0]):
        v = edge.operands[0]
        edge = graph.makers[v]
    return v


def read_by(graph: Graph, edge: Op) -> tuple[Op, str]:
    """The op that reads what an edge reshards, in a loop, or the edge itself; and in words what is resharded."""
    reader, (v,) = edge, edge.results
    if not edge.site:
        return edge, f"{graph.label(v)}, an output"
    while enters_loop(reader) and graph.users[reader.results[0]]:
        (v,) = reader.results
        reader = graph.users[v][0]
    if reader.name == "edge":
        return edge, f"{graph.label(edge.results[0])}, at a loop or branch boundary"
    operand = f"operand {reader.operands.index(v)} of {reader.name}"
    return reader, f"{operand}, {graph.label(edge.operands[0])}, before the loop"
