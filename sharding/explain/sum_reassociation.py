"""Sums of partial sums: XLA:TPU and XLA:GPU add them before a single reduction; XLA:CPU reduces each.

`add(all-reduce(x), all-reduce(y))` becomes `all-reduce(add(x, y))`, and likewise for reduce-scatters, where the sums
are over the same axes and used only there (`AllReduceReassociate` of openxla/xla). The gradient of a value that several
products read, such as the input of q, k and v, is the usual case. XLA:GPU first folds an all-reduce of an all-reduce
into one over the axes of both (`AllReduceFolder`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import compat
from ..graph import Graph, Op
from ..hardware import Platform
from ..propagation.partial_sums import SUMS
from ..rewrite.reshard import Step
from ..spec import Axis
from .sums_behind_loops import ADDS, Reduction, sums_behind_loops

_FORMATTING = frozenset({"annotate", "copy", "name", "pad", "reshape", "slice", "squeeze"})
LOOKED_THROUGH: Mapping[Platform, frozenset[str]] = {
    "gpu": _FORMATTING | {"convert_element_type"},
    "tpu": _FORMATTING,
}
"""Platform whose compiler reassociates -> ops on one array that may be between a reduction and the addition."""

SPLITS: Collection[Platform] = ("gpu",)
"""Platforms whose compiler reduce-scatters over the axes that a sum is then sliced along, before it all-reduces over
the others (`AllReduceSplitter`)."""


@dataclass(frozen=True)
class Reassociation:
    """The reductions that are left."""

    left: Mapping[int, tuple[Reduction, ...]] = field(default_factory=dict)
    """Value -> those behind the op that computes it, for every value that had or has any."""
    behind_loops: Mapping[int, tuple[Reduction, ...]] = field(default_factory=dict)
    """Result of a loop -> those behind the loop."""


def split_all_reduce(sums: Sequence[Step], rest: Sequence[Step], used: Collection[frozenset[Axis]]) -> list[Reduction]:
    """The reduce-scatter and all-reduce of an all-reduce of which each device keeps a slice; empty if it stays whole.

    Args:
        sums: the reductions of a result.
        rest: the steps that follow.
        used: the axes of each sum of the program; without another one over the same axes, nothing is gained.
    """
    if [step.kind for step in sums] != ["all-reduce"] or {step.kind for step in rest} != {"slice"}:
        return []
    sliced = {axis for step in rest for axis in step.axes}
    scattered = tuple(axis for axis in sums[0].axes if axis in sliced)
    others = tuple(axis for axis in sums[0].axes if axis not in sliced)
    if sliced != {*scattered} or not others or frozenset(others) not in used:
        return []
    return [("reduce-scatter", scattered), ("all-reduce", others)]


def reassociate(
    graph: Graph,
    platform: Platform,
    reductions: Mapping[int, Sequence[Reduction]],
    moves: Callable[[Op], bool],
    axes: Callable[[int], object],
    order: Callable[[Axis], int],
    shard_bytes: Callable[[int], int],
) -> Reassociation:
    """The reductions that are left behind each op.

    Args:
        graph: the program.
        platform: whose compiler reassociates.
        reductions: value -> its reductions in order, for values that are only reduced and not moved.
        moves: whether an op reshards any of its arrays.
        axes: the sharding of a value, which must be that of both summands.
        order: the sort key of an axis in mesh order.
        shard_bytes: bytes of a value on one device.
    """
    left = {v: _folded(found, order) if platform == "gpu" else tuple(found) for v, found in reductions.items()}

    def reduced(v: int) -> int | None:
        """The value, reduced by addition, that is looked through to."""
        while graph.num_uses[v] == 1:
            op = graph.makers.get(v)
            if left.get(v):
                return v if op is not None and op.name in SUMS | ADDS else None
            operand = None if op is None or moves(op) else _only_operand(graph, op, LOOKED_THROUGH[platform])
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
    return Reassociation(left, sums_behind_loops(graph, left, reduced, moves, shard_bytes))


def _only_operand(graph: Graph, op: Op, looked_through: Collection[str]) -> int | None:
    """The array that an op passes on: that of a formatting op, or what is added to zero."""
    if len(op.operands) == 1 and (op.name in looked_through or _is_reshape(graph, op) or _is_turned_product(graph, op)):
        return op.operands[0]
    if op.name not in ADDS or not op.site:
        return None
    arrays = [v for v, atom in zip(op.operands, op.site[0].invars, strict=False) if not _is_zero(atom)]
    return arrays[0] if len(arrays) == 1 else None


def _is_reshape(graph: Graph, op: Op) -> bool:
    """Whether an op only adds or removes dims of size 1."""
    before, after = (graph.shapes[v] for v in (op.operands[0], op.results[0]))
    return op.name in ("broadcast_in_dim", "reduce_sum") and math.prod(before) == math.prod(after)


def _is_turned_product(graph: Graph, op: Op) -> bool:
    """Whether an op transposes a matrix product, which is the product of the other order."""
    maker: Op | None = op
    while maker is not None and maker.name == "transpose" and len(graph.shapes[maker.results[0]]) == 2:
        maker = graph.makers.get(maker.operands[0])
    return op.name == "transpose" and maker is not None and maker.name == "dot_general"


def _is_zero(atom: Any) -> bool:
    return compat.is_literal(atom) and not atom.aval.shape and atom.val == 0


def _folded(reductions: Sequence[Reduction], order: Callable[[Axis], int]) -> tuple[Reduction, ...]:
    """All-reduces of all-reduces as one, over their axes in mesh order."""
    if {kind for kind, _ in reductions} != {"all-reduce"}:
        return tuple(reductions)
    return (("all-reduce", tuple(sorted((axis for _, axes in reductions for axis in axes), key=order))),)


def _common_end(one: Sequence[Reduction], other: Sequence[Reduction]) -> tuple[Reduction, ...]:
    """The last reductions that both have in common; reduce-scatters only if there is nothing else."""
    found: list[Reduction] = []
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b or (a[0] == "reduce-scatter" and len(one) + len(other) > 2):
            break
        found.insert(0, a)
    return tuple(found)
