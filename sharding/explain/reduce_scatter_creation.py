"""All-reduces whose result is only sliced behind a barrier: compilers turn them into reduce-scatters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from ..graph import Graph, Op
from ..rewrite.reshard import chain
from ..spec import Axis, Spec

COMMUTES_WITH_SLICE = frozenset("add annotate barrier convert_element_type name".split())
"""Ops between a sum and its slice, such as a bias add, that may as well run after the slice."""


def reduce_scattered(graph: Graph, specs: Sequence[Spec], sizes: Mapping[str, int]) -> dict[int, frozenset[Axis]]:
    """Value -> the axes over which it is sliced behind a barrier, if that is its only use.

    A sum over these axes that ends in such a value is a reduce-scatter.
    """
    slices = {
        op.operands[0]: axes for op in graph.ops if op.name == "barrier" and (axes := _slice(op, graph, specs, sizes))
    }
    if not slices:
        return {}
    found: dict[int, frozenset[Axis]] = {}
    waiting = list(slices.items())
    while waiting:
        v, axes = waiting.pop()
        if graph.num_uses[v] > 1 or v in found:
            continue
        found[v] = axes
        op = graph.makers.get(v)
        if op is not None and op.name in COMMUTES_WITH_SLICE:
            waiting += [(operand, axes) for operand in op.operands if specs[operand].axes == specs[v].axes]
    return found


def is_masked(op: Op | None) -> bool:
    """Whether an op masks what it reduces before that is sliced: rows of a gather that are out of bounds.

    XLA:GPU all-reduces and slices those; XLA:TPU slices first.
    """
    if op is None or op.name != "gather" or not op.site:
        return False
    return op.site[0].params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP


def _slice(op: Op, graph: Graph, specs: Sequence[Spec], sizes: Mapping[str, int]) -> frozenset[Axis]:
    """The further axes that a barrier's result is sharded over; none if the reshard is more than a slice."""
    (x,), (y,) = op.operands, op.results
    if specs[x].axes == specs[y].axes or not graph.shapes[x]:
        return frozenset()
    steps = chain(specs[x], specs[y], graph.shapes[x], graph.itemsize(x), sizes, permutes=not graph.diverges(op))
    return frozenset(a for step in steps for a in step.axes) if all(s.kind == "slice" for s in steps) else frozenset()
