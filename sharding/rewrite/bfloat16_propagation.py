"""Values that XLA:TPU computes in bfloat16 because nothing reads more of them (its `BFloat16Propagation`).

A TPU multiplies in bfloat16 at default precision. Float32 values that only such products or conversions read, maybe
behind ops that commute with rounding or through loops, are rounded where they are made: they take half the bytes, and
so do their collectives.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection

from ..graph import Graph, Op
from ..propagation import Assignment
from .moving_ops import moving_ops, operand_steps
from .op_strategy import OpStrategies
from .reshard_moves import DimAxes

PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
FORMATTING = frozenset({"scan xs", "scan ys"}).union(
    """
    abs all_gather all_to_all annotate broadcast_in_dim clamp concatenate copy copy_p edge expand_dims max min name
    optimization_barrier pad ppermute reduce_max reduce_min reduce_window_max reduce_window_min reshape rev slice sort
    split squeeze transpose
    """.split()
)
"""Ops that rounding commutes with."""
FIRST_OPERANDS = {"dynamic_slice": (0, 1), "dynamic_update_slice": (0, 2), "gather": (0, 1), "select_n": (1, None)}
"""Op -> the range of operands of which that holds, where it has others."""

MIN_SUMMED, MIN_FREE = 256, 64
"""Least number of elements that are summed, and that the matrix has beside them, for the products of many vectors with
a matrix each that a TPU multiplies in bfloat16; others, and those of a single vector, are not matrix products to it.
Bisected with the compiler."""


def rounded_values(graph: Graph) -> frozenset[int]:
    """The float32 values that are only read in bfloat16."""
    return graph.once("rounded values", lambda: frozenset(_rounded_values(graph)))


def _rounded_values(graph: Graph) -> set[int]:
    kept = {*graph.outputs, *graph.inputs}.union(*graph.dependencies.values())
    found = {v for v in graph.makers if v not in kept and graph.dtype_names[v] == "float32"}
    changed = True
    while changed:
        wide = {
            v
            for op in reversed(graph.ops)
            if not found.isdisjoint(op.operands)
            for k, v in enumerate(op.operands)
            if v in found and not rounds(graph, op, k, found)
        }
        found -= wide
        changed = bool(wide)
    return found


def narrow_reshards(assignment: Assignment) -> Collection[tuple[int, DimAxes]]:
    """(value, axes) of each reshard step of a program whose result is only read in bfloat16."""
    return assignment.once("narrow reshards", lambda: _narrow_reshards(assignment))


def _narrow_reshards(assignment: Assignment) -> Collection[tuple[int, DimAxes]]:
    graph, strategies = assignment.graph, OpStrategies.shared(assignment)
    rounded = rounded_values(graph)
    readers: defaultdict[tuple[int, DimAxes], list[bool]] = defaultdict(list)
    for op in moving_ops(assignment):
        for k, (v, steps) in enumerate(operand_steps(assignment, strategies, op)):
            for step in steps:
                readers[v, step.spec.axes].append(rounds(graph, op, k, rounded))
        if op.name == "edge":
            continue
        for v, steps in zip(op.results, strategies.of(op).result_steps, strict=True):
            moved = op.operands[0] if op.name == "annotate" else v
            for step in steps:
                readers[moved, step.spec.axes].append(v in rounded)
    return {key for key, found in readers.items() if all(found)}


def rounds(graph: Graph, op: Op, k: int, rounded: Collection[int]) -> bool:
    """Whether an op reads its operand number `k` in bfloat16."""
    if op.name in PRODUCTS:
        return is_default(op.site[0].params.get("precision")) and not _is_of_vectors(graph, op)
    if op.name == "convert_element_type":
        return graph.dtype_names[op.results[0]] == "bfloat16" or op.results[0] in rounded
    first, end = FIRST_OPERANDS.get(op.name, (0, None))
    commutes = op.name in FORMATTING or op.name in FIRST_OPERANDS
    return commutes and k in range(len(op.operands))[first:end] and all(v in rounded for v in op.results)


def _is_of_vectors(graph: Graph, op: Op) -> bool:
    """Whether a product multiplies vectors, or sums nothing: a TPU does both in float32."""
    if op.name != "dot_general":
        return False
    summed, batch = op.site[0].params["dimension_numbers"]
    shapes = [graph.shapes[v] for v in op.operands]
    num_batch, num_summed = (math.prod(shapes[0][d] for d in dims[0]) for dims in (batch, summed))
    free = sorted(math.prod(shape) // max(1, num_batch * num_summed) for shape in shapes)
    if num_summed == 1:
        return True
    return free[0] == 1 and not (num_batch > 1 and num_summed >= MIN_SUMMED and free[1] >= MIN_FREE)


def is_default(precision: object) -> bool:
    """Whether a product's precision is the platform's default."""
    given = precision if isinstance(precision, tuple) else (precision,)
    return all(one is None or getattr(one, "name", str(one)) == "DEFAULT" for one in given)
