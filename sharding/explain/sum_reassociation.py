"""Sums of partial sums: XLA:TPU and XLA:GPU add them before a single reduction; XLA:CPU reduces each.

`add(all-reduce(x), all-reduce(y))` becomes `all-reduce(add(x, y))`, and likewise for reduce-scatters, where the sums
are over the same axes and used only there (`AllReduceReassociate` of openxla/xla). The gradient of a value that several
products read, such as the input of q, k and v, is the usual case. XLA:GPU first folds an all-reduce of an all-reduce
into one over the axes of both (`AllReduceFolder`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .. import compat
from ..cost import Kind
from ..graph import Graph, Op
from ..hardware import Platform
from ..spec import Axis

Reduction = tuple[Kind, tuple[Axis, ...]]
"""The kind and axes of a collective that completes a sum."""

ADDS = frozenset({"add", "add_any"})
_FORMATTING = frozenset({"annotate", "copy", "name", "pad", "reshape", "slice", "squeeze"})
LOOKED_THROUGH: Mapping[Platform, frozenset[str]] = {
    "gpu": _FORMATTING | {"convert_element_type"},
    "tpu": _FORMATTING,
}
"""Platform whose compiler reassociates -> ops on one array that may be between a reduction and the addition."""


def reassociate(
    graph: Graph,
    platform: Platform,
    reductions: Mapping[int, Sequence[Reduction]],
    moves: Callable[[Op], bool],
    axes: Callable[[int], object],
    order: Callable[[Axis], int],
) -> dict[int, tuple[Reduction, ...]]:
    """Value -> the reductions that are left behind the op that computes it, for every value with any before or after.

    Args:
        graph: the program.
        platform: whose compiler reassociates.
        reductions: value -> its reductions in order, for values that are only reduced and not moved.
        moves: whether an op reshards any of its arrays.
        axes: the sharding of a value, which must be that of both summands.
        order: the sort key of an axis in mesh order.
    """
    uses = Counter(v for op in graph.ops for v in op.operands)
    uses.update(graph.outputs)
    left = {v: _folded(found, order) if platform == "gpu" else tuple(found) for v, found in reductions.items()}

    def reduced(v: int) -> int | None:
        """The reduced value that is looked through to."""
        while uses[v] == 1:
            if left.get(v):
                return v
            op = graph.makers.get(v)
            operand = None if op is None or moves(op) else _only_operand(op, LOOKED_THROUGH[platform])
            if operand is None:
                return None
            v = operand
        return None

    for op in graph.ops:
        if op.name not in ADDS or len(op.operands) != 2 or len(set(op.operands)) == 1 or moves(op):
            continue
        first, second = map(reduced, op.operands)
        (result,) = op.results
        if first is None or second is None or any(axes(v) != axes(result) for v in op.operands):
            continue
        common = _common_end(left[first], left[second])
        if common:
            for v in (first, second):
                left[v] = left[v][: -len(common)]
            left[result] = common
    return left


def _only_operand(op: Op, looked_through: Collection[str]) -> int | None:
    """The array that an op passes on: that of a formatting op, or what is added to zero."""
    if op.name in looked_through and len(op.operands) == 1:
        return op.operands[0]
    if op.name not in ADDS or not op.site:
        return None
    arrays = [v for v, atom in zip(op.operands, op.site[0].invars, strict=False) if not _is_zero(atom)]
    return arrays[0] if len(arrays) == 1 else None


def _is_zero(atom: Any) -> bool:
    return compat.is_literal(atom) and not atom.aval.shape and atom.val == 0


def _folded(reductions: Sequence[Reduction], order: Callable[[Axis], int]) -> tuple[Reduction, ...]:
    """All-reduces of all-reduces as one, over their axes in mesh order."""
    if {kind for kind, _ in reductions} != {"all-reduce"}:
        return tuple(reductions)
    return (("all-reduce", tuple(sorted((axis for _, axes in reductions for axis in axes), key=order))),)


def _common_end(one: Sequence[Reduction], other: Sequence[Reduction]) -> tuple[Reduction, ...]:
    """The last reductions that both have in common."""
    found: list[Reduction] = []
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        found.insert(0, a)
    return tuple(found)
