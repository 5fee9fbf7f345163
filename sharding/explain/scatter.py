"""Sums that are whole only to be cut behind a barrier: compilers scatter them where they are added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..graph import Graph, Op
from ..reshard import chain
from ..spec import Axis, Spec

PASSED = frozenset("add annotate barrier convert_element_type name".split())
"""Ops behind a sum, such as those of a bias, before which the sum may as well be cut."""


def scattered(graph: Graph, specs: Sequence[Spec], sizes: Mapping[str, int]) -> dict[int, frozenset[Axis]]:
    """Value -> the axes by which it is cut behind a barrier and used in no other way.

    A sum over these axes that ends in such a value is what a reduce-scatter does.
    """
    cuts = {
        op.operands[0]: axes for op in graph.ops if op.name == "barrier" and (axes := _cut(op, graph, specs, sizes))
    }
    if not cuts:
        return {}
    uses = Counter(v for op in graph.ops for v in op.operands)
    uses.update(graph.outputs)
    found: dict[int, frozenset[Axis]] = {}
    waiting = list(cuts.items())
    while waiting:
        v, axes = waiting.pop()
        if uses[v] > 1 or v in found:
            continue
        found[v] = axes
        op = graph.makers.get(v)
        if op is not None and op.name in PASSED:
            waiting += [(operand, axes) for operand in op.operands if specs[operand].axes == specs[v].axes]
    return found


def _cut(op: Op, graph: Graph, specs: Sequence[Spec], sizes: Mapping[str, int]) -> frozenset[Axis]:
    """The axes by which a barrier's result is split beyond its operand; none where anything else moves."""
    (x,), (y,) = op.operands, op.results
    if specs[x].axes == specs[y].axes or not graph.shapes[x]:
        return frozenset()
    steps = chain(specs[x], specs[y], graph.shapes[x], graph.itemsize(x), sizes, permutes=not graph.diverges(op))
    return frozenset(a for step in steps for a in step.axes) if all(s.kind == "slice" for s in steps) else frozenset()
