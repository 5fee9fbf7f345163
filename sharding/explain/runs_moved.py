"""How often, and in which loops, an array is resharded for an op: a loop invariant before the loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from .. import compat
from ..graph import Graph, Loop, Op


def times_moved(graph: Graph, op: Op, v: int) -> int:
    """How often an operand is resharded: a loop invariant before its loop."""
    return graph.loop_invariants[v] if is_moved_outside(graph, op, v) else op.times


def loops_moved(graph: Graph, op: Op, v: int) -> Iterable[Loop]:
    """The loops of unknown length in which an array of an op is resharded."""
    maker = graph.makers.get(v)
    if maker is not None and (op.name == "edge" or is_moved_outside(graph, op, v)):
        return maker.loops
    return op.loops


def is_moved_outside(graph: Graph, op: Op, v: int) -> bool:
    """Whether an operand is a loop invariant, and not behind the barrier of a recomputation in the loop."""
    inner = itertools.takewhile(lambda eqn: eqn.primitive.name not in ("scan", "while"), op.site[1:])
    return v in graph.loop_invariants and not any(map(compat.is_recomputed, inner))
