"""Sums of partial sums: XLA:TPU and XLA:GPU add them before a single reduction; XLA:CPU reduces each.

`add(all-reduce(x), all-reduce(y))` becomes `all-reduce(add(x, y))`, and likewise for reduce-scatters, where the sums
are over the same axes and used only there (`AllReduceReassociate` of openxla/xla); likewise for maxima and truth
values. The gradient of a value that several products read, such as the input of q, k and v, is the usual case. Both
first fold an all-reduce of an all-reduce into one over the axes of both (`AllReduceFolder`). Both reduce all dims that
one reduction after another sums, and all-reduce the result once over the axes of both: `x.sum(1).sum(0)` of a matrix
sends one number. XLA:TPU rounds sums that are only read in bfloat16 before it all-reduces them. Products of
sums with one factor are added before they are multiplied (`AlgebraicSimplifier`), on GPUs if that is a power of 2.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import compat
from ..graph import Graph, Op
from ..hardware import Platform
from ..propagation.partial_sums import SUMS
from ..rewrite.reshard import Step
from ..rewrite.rounded_products import rounded_product
from ..spec import Axis, num_parts
from .reduce_scatter_creation import in_mesh_order, is_part_of_each
from .sums_behind_loops import ADDS, Reduction, SumsBehindLoop, is_narrow_sum, sums_behind_loops

CONVERT = "convert_element_type"
_FORMATTING = frozenset({"annotate", "copy", "name", "pad", "reshape", "slice", "squeeze"})
LOOKED_THROUGH: Mapping[Platform, frozenset[str]] = {
    "gpu": _FORMATTING | {CONVERT},
    "tpu": _FORMATTING,
}
"""Platform whose compiler reassociates -> ops on one array that may be between a reduction and the addition."""

CHANGES = LOOKED_THROUGH["gpu"] - {"annotate", "copy", "name"}
"""Ops that XLA:GPU looks through to an all-reduce, but not to a reduce-scatter (`ReduceScatterReassociate`)."""

MERGED = frozenset({"reduce_max", "reduce_min", "reduce_sum"})
"""Reductions of which compilers for TPUs and GPUs make one if the same one follows."""

REDUCTIONS = MERGED | {"reduce_and", "reduce_or", "reduce_prod"}
"""Reductions whose partial results are all-reduced over one axis after another before any slice is taken."""

COMBINED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(ADDS, SUMS | ADDS | {"kernel_call"}),
    **{name: frozenset({name, f"reduce_{name}"}) for name in ("and", "max", "min", "or")},
}
"""Op on two arrays -> what makes arrays that are combined before they are reduced in the same way."""

SPLITS: Collection[Platform] = ("gpu",)
"""Platforms whose compiler reduce-scatters over the axes that a sum is then sliced along, before it all-reduces over
the others (`AllReduceSplitter`)."""


SumOver = tuple[tuple[int, ...], frozenset[Axis]]
"""The computation of a sum, and its axes."""


@dataclass(frozen=True)
class Reassociation:
    """The reductions that are left."""

    left: Mapping[int, tuple[Reduction, ...]] = field(default_factory=dict)
    """Value -> those behind the op that computes it, for every value that had or has any."""
    behind_loops: Mapping[int, SumsBehindLoop] = field(default_factory=dict)
    """Result of a loop -> those behind the loop."""


def sums_and_rest(
    op: Op | None, steps: Sequence[Step], platform: Platform, sizes: Mapping[str, int], *, is_scalar: bool
) -> tuple[list[Step], Sequence[Step]]:
    """The reductions of a result of an op, and the steps that reshard it then.

    An all-reduce of which each device first keeps a slice, over the same axes, is a reduce-scatter.

    Args:
        op: what makes the result.
        steps: after the op.
        platform: whose compiler folds reductions.
        sizes: the mesh axis sizes.
        is_scalar: whether each device has one element of the result.
    """
    if not steps:
        return [], steps
    summed = [step for step in steps if step.is_sum]
    sums, rest = _folded_steps(op, summed, platform, sizes, is_scalar=is_scalar), steps[len(summed) :]
    slices = list(itertools.takewhile(lambda step: step.kind == "slice", rest))
    if [step.kind for step in sums] == ["all-reduce"] and {a for s in slices for a in s.axes} == {*sums[0].axes}:
        if len(summed) == 1 or is_part_of_each(slices[-1].spec, sums[0].axes):
            return [dataclasses.replace(sums[0], kind="reduce-scatter", spec=slices[-1].spec)], rest[len(slices) :]
    return sums, rest


def _folded_steps(
    op: Op | None, sums: Sequence[Step], platform: Platform, sizes: Mapping[str, int], *, is_scalar: bool
) -> list[Step]:
    """The all-reduces of a reduction's result, of which a slice may be kept, as one over all of their axes.

    Only products run as a reduce-scatter over some axes and an all-reduce over the others.
    """
    if op is None or op.name not in REDUCTIONS or platform not in LOOKED_THROUGH or len(sums) < 2:
        return list(sums)
    axes = tuple(axis for step in reversed(sums) for axis in step.axes)
    if is_scalar and stays_one_by_one(platform, axes, sizes):
        return list(sums)
    axes = axes if platform == "tpu" else in_mesh_order(axes, sizes)
    is_scattered = any(step.kind == "reduce-scatter" for step in sums) and is_part_of_each(sums[-1].spec, axes)
    kind = "reduce-scatter" if is_scattered else "all-reduce"
    size = max(step.num_bytes for step in sums)
    return [dataclasses.replace(sums[-1], kind=kind, axes=axes, num_bytes=size)]


def stays_one_by_one(platform: Platform, axes: Collection[Axis], sizes: Mapping[str, int]) -> bool:
    """Whether all-reduces of an all-reduced scalar stay such, as on TPUs if they aren't over all devices together."""
    return platform == "tpu" and num_parts(tuple(axes), sizes) < math.prod(sizes.values())


def computation(op: Op | None) -> tuple[int, ...]:
    """The loops and branches that an op is in; XLA compiles the body of each as a computation of its own."""
    enclosing = () if op is None else op.site[1:]
    return tuple(id(eqn) for eqn in enclosing if eqn.primitive.name in ("cond", "scan", "while"))


def split_all_reduce(
    op: Op | None, sums: Sequence[Step], rest: Sequence[Step], used: Collection[SumOver], platform: Platform
) -> list[Reduction]:
    """The reduce-scatter and all-reduce of an all-reduce of which each device keeps a slice; empty if it stays whole.

    Args:
        op: what makes the result; those of a reduction stay whole.
        sums: the reductions of a result.
        rest: the steps that follow.
        used: the computation and the axes of each sum; without another one over the same axes, nothing is gained.
        platform: whose compiler splits it.
    """
    is_whole = platform not in SPLITS or (op is not None and op.name in REDUCTIONS)
    if is_whole or [step.kind for step in sums] != ["all-reduce"] or {step.kind for step in rest} != {"slice"}:
        return []
    sliced = {axis for step in rest for axis in step.axes}
    scattered = tuple(axis for axis in sums[0].axes if axis in sliced)
    others = tuple(axis for axis in sums[0].axes if axis not in sliced)
    if sliced != {*scattered} or not others or (computation(op), frozenset(others)) not in used:
        return []
    return [("reduce-scatter", scattered), ("all-reduce", others)]


def reassociate(
    graph: Graph,
    platform: Platform,
    reductions: Mapping[int, Sequence[Reduction]],
    moves: Callable[[Op], bool],
    reads_in_place: Callable[[Op], bool],
    axes: Callable[[int], Sequence[Sequence[Axis]]],
    sizes: Mapping[str, int],
    shard_bytes: Callable[[int], int],
) -> Reassociation:
    """The reductions that are left behind each op.

    Args:
        graph: the program.
        platform: whose compiler reassociates.
        reductions: value -> its reductions in order, for values that are only reduced and not moved.
        moves: whether an op reshards any of its arrays.
        reads_in_place: whether an op reshards none of its operands, and its results only by `reductions`.
        axes: the sharding of a value, which must be that of both summands.
        sizes: the mesh axis sizes.
        shard_bytes: bytes of a value on one device.
    """

    def folds(v: int, found: Sequence[Reduction], source: int | None = None) -> tuple[Reduction, ...]:
        """All-reduces of all-reduces as one.

        Args:
            v: the reduced value.
            found: its reductions.
            source: the result of the first reduction, if that is another value.
        """
        maker = graph.makers.get(v if source is None else source)
        dims = axes(maker.operands[0]) if maker is not None and maker.name in REDUCTIONS else ()
        folded = _folded(found, platform, sizes, [axis for dim in dims for axis in dim])
        is_scalar = shard_bytes(v) <= graph.itemsize(v)
        return tuple(found) if is_scalar and stays_one_by_one(platform, folded[0][1], sizes) else folded

    left = {v: folds(v, found) for v, found in reductions.items()}
    for op in graph.ops:
        if platform == "tpu" and (summed := _narrowed(graph, op, left, moves)) is not None:
            left[op.results[0]], left[summed] = left[summed], ()
        source = _merged_with(graph, op, left, reads_in_place) if op.name in MERGED else None
        if source is None:
            continue
        (v,) = op.results
        left[v] = folds(v, (*left[source], *left.get(v, ())), source)
        if graph.num_uses[source] == 1:
            left[source] = ()

    def reduced(
        v: int,
        makers: Collection[str] = COMBINED["add"],
        through: Collection[str] = LOOKED_THROUGH[platform],
        *,
        is_shared: bool = False,
    ) -> int | None:
        """The value, reduced as one of some ops does, that is looked through to; others may read it if it is shared."""
        while True:
            op, is_read_once = graph.makers.get(v), graph.num_uses[v] == 1
            if left.get(v):
                is_sum = op is not None and op.name in makers and not _negates(graph, op)
                return v if is_sum and (is_shared or is_read_once) else None
            operand = None if op is None or moves(op) else _only_operand(graph, op, through)
            if operand is None or not is_read_once:
                return None
            v = operand

    def is_converted(v: int, source: int) -> bool:
        """Whether a value is more than the reduction's own result, possibly named."""
        while v != source:
            op = graph.makers[v]
            operand = _only_operand(graph, op, LOOKED_THROUGH[platform])
            if op.name in CHANGES or operand is None:
                return True
            v = operand
        return False

    scaled: dict[int, float] = {}
    for op in graph.ops:
        if op.name not in COMBINED or len(op.operands) != 2 or len(set(op.operands)) == 1 or moves(op):
            continue
        (result,), operands = op.results, op.operands
        (one, x), (other, y) = (_scaled(graph, v, scaled, moves, platform) for v in operands)
        if one == other != 1 and op.name in ADDS:
            scaled[result], operands = one, (x, y)
        first, second = (reduced(v, COMBINED[op.name]) for v in operands)
        if first is None or second is None or any(axes(v) != axes(result) for v in operands):
            continue
        converts = any(map(is_converted, op.operands, (first, second)))
        is_alone = len(left[first]) == len(left[second]) == 1
        scatters = platform == "tpu" or (is_alone and not converts)
        common = _common_end(left[first], left[second], scatters=scatters)
        if common:
            for v in (first, second):
                left[v] = left[v][: -len(common)]
            left[result] = common

    def updated_by(v: int) -> int | None:
        return reduced(v, COMBINED["add"] | {CONVERT}, LOOKED_THROUGH[platform] | {CONVERT}, is_shared=True)

    def is_sliced(v: int) -> bool:
        """Whether a device keeps a slice of what was all-reduced."""
        reduced_axes = {axis for kind, over in left[v] if kind == "all-reduce" for axis in over}
        return any(not reduced_axes.isdisjoint(dim) for dim in axes(v))

    return Reassociation(left, sums_behind_loops(graph, platform, left, updated_by, moves, is_sliced, shard_bytes))


def _scaled(
    graph: Graph, v: int, scaled: Mapping[int, float], moves: Callable[[Op], bool], platform: Platform
) -> tuple[float, int]:
    """(factor, the value that it multiplies): compilers add two such products before they multiply; else (1, v)."""
    op = graph.makers.get(v)
    while op is not None and op.name in ADDS and v not in scaled and graph.num_uses[v] == 1:
        operand = _only_operand(graph, op, ())  # what is added to zero
        if operand is None or moves(op):
            return 1, v
        v, op = operand, graph.makers.get(operand)
    if v in scaled:
        return scaled[v], v
    if op is None or op.name not in ("div", "mul") or graph.num_uses[v] != 1 or moves(op):
        return 1, v
    scalars = [a.val for a in op.site[0].invars if compat.is_literal(a) and not a.aval.shape]
    literals = [float(x) for x in scalars if not np.iscomplexobj(x)]
    arrays = [x for x in op.operands if graph.shapes[x] == graph.shapes[v] and (x in graph.makers or x in graph.inputs)]
    is_product = len(literals) == len(arrays) == 1 and (op.name == "mul" or op.operands[0] == arrays[0])
    if not is_product or (platform == "gpu" and abs(math.frexp(literals[0])[0]) != 0.5):
        return 1, v
    return (literals[0] if op.name == "mul" else 1 / literals[0]), arrays[0]


def _negates(graph: Graph, op: Op) -> bool:
    """Whether an op sums what was negated: compilers negate the sum, behind its reduction, before they reassociate."""
    maker = graph.makers.get(op.operands[0]) if op.name == "reduce_sum" else None
    while maker is not None and maker.name == "annotate":
        maker = graph.makers.get(maker.operands[0])
    return maker is not None and maker.name == "neg"


def _narrowed(graph: Graph, op: Op, left: Mapping[int, Sequence[Reduction]], moves: Callable[[Op], bool]) -> int | None:
    """The all-reduced value that an op rounds to bfloat16, as its only use: of float32, or a product of integers, which
    may be reduce-scattered over other axes."""
    if op.name != CONVERT or moves(op):
        return None
    (v,), (result,) = op.operands, op.results
    product = rounded_product(graph, op)
    while not left.get(v) and graph.num_uses[v] == 1 and (maker := graph.makers.get(v)) is not None:
        if moves(maker) or not (maker.name in ("annotate", "reshape") or _is_reshape(graph, maker)):
            return None
        v = maker.operands[0]
    kinds = {kind for kind, _ in left.get(v, ())}
    is_rounded = graph.dtype_names[v] == "float32" and graph.dtype_names[result] == "bfloat16"
    moves_behind = "all-reduce" in kinds and (v == product or (is_rounded and len(kinds) == 1))
    return v if moves_behind and graph.num_uses[v] == 1 else None


def _merged_with(
    graph: Graph, op: Op, left: Mapping[int, Sequence[Reduction]], reads_in_place: Callable[[Op], bool]
) -> int | None:
    """The all-reduced value behind a reduction of the same kind whose result a reduction reads, if any."""
    if not reads_in_place(op) or {kind for kind, _ in left.get(op.results[0], ())} - {"all-reduce"}:
        return None
    (v,) = op.operands
    while (maker := graph.makers.get(v)) is not None and reads_in_place(maker):
        is_same = maker.name == op.name or (maker.name == CONVERT and is_narrow_sum(graph, maker))
        if is_same and left.get(v):
            return v if {kind for kind, _ in left[v]} == {"all-reduce"} else None
        if graph.num_uses[v] > 1 or len(maker.operands) != 1 or not _only_turns(graph, maker):
            return None
        (v,) = maker.operands
    return None


def _only_turns(graph: Graph, op: Op) -> bool:
    """Whether an op only transposes, or adds or removes dims of size 1."""
    return op.name in ("annotate", "squeeze", "transpose") or _is_reshape(graph, op)


def _only_operand(graph: Graph, op: Op, looked_through: Collection[str]) -> int | None:
    """The array that an op passes on: that of a formatting op, or what is added to zero."""
    if len(op.operands) == 1 and (op.name in looked_through or _is_reshape(graph, op)):
        return op.operands[0]
    if op.name not in ADDS or not op.site:
        return None
    arrays = [v for v, atom in zip(op.operands, op.site[0].invars, strict=False) if not _is_zero(atom)]
    return arrays[0] if len(arrays) == 1 else None


def _is_reshape(graph: Graph, op: Op) -> bool:
    """Whether an op only adds or removes dims of size 1."""
    before, after = (graph.shapes[v] for v in (op.operands[0], op.results[0]))
    return op.name in ("broadcast_in_dim", "reduce_sum") and math.prod(before) == math.prod(after)


def _is_zero(atom: Any) -> bool:
    return compat.is_literal(atom) and not atom.aval.shape and atom.val == 0


def _folded(
    reductions: Sequence[Reduction], platform: Platform, sizes: Mapping[str, int], reduced: Sequence[Axis]
) -> tuple[Reduction, ...]:
    """All-reduces of all-reduces as one over their axes, sorted by XLA:GPU, in the order of dims by XLA:TPU.

    All-reduces are added only if their devices are in one order.

    Args:
        reductions: the reductions of a value.
        platform: whose compiler folds them.
        sizes: the mesh axis sizes.
        reduced: the axes of the array that is reduced, in the order of its dims.
    """
    if {kind for kind, _ in reductions} != {"all-reduce"}:
        return tuple(reductions)
    axes = tuple(axis for _, axes in reductions for axis in axes)
    if platform == "gpu" and len(reductions) > 1:
        axes = in_mesh_order(axes, sizes)
    elif platform == "tpu" and set(axes) <= set(reduced):
        axes = tuple(axis for axis in reduced if axis in axes)
    return (("all-reduce", axes),)


def _common_end(one: Sequence[Reduction], other: Sequence[Reduction], *, scatters: bool) -> tuple[Reduction, ...]:
    """The last reductions that both have in common; reduce-scatters only if they may."""
    found: list[Reduction] = []
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b or (a[0] == "reduce-scatter" and not scatters):
            break
        found.insert(0, a)
    return tuple(found)
