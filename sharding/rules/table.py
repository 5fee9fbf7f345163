"""The table: one factor rule per primitive.

An op whose primitive is not listed stops the flow: its results start without a split, and the pass says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import contraction, indexing, random, shape, window
from .rule import Flow, Rule, Shape, pointwise

MakeRule = Callable[[Sequence[Shape], Sequence[Shape], Mapping[str, Any]], Rule | None]
"""(operand shapes, result shapes, the equation's parameters) -> its rule."""

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul
    mulhi name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow pvary random_clone
    random_fold_in random_gamma random_gamma_grad real reduce_precision regularized_incomplete_beta rem reshard
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh threefry2x32 xor zeta
    """.split()
)

MOVES = frozenset({"copy_p", "optimization_barrier"})
"""Ops of n operands and n results, each result its operand."""

RULES: dict[str, MakeRule] = {
    "argmax": contraction.reduce,
    "argmin": contraction.reduce,
    "bitcast_convert_type": shape.bitcast_convert_type,
    "broadcast_in_dim": shape.broadcast_in_dim,
    "concatenate": shape.concatenate,
    "conv_general_dilated": contraction.conv_general_dilated,
    "cumlogsumexp": contraction.cumulative,
    "cummax": contraction.cumulative,
    "cummin": contraction.cumulative,
    "cumprod": contraction.cumulative,
    "cumsum": contraction.cumulative,
    "dot_general": contraction.dot_general,
    "dynamic_slice": indexing.dynamic_slice,
    "dynamic_update_slice": indexing.dynamic_update_slice,
    "gather": indexing.gather,
    "iota": shape.iota,
    "pad": shape.cut,
    "random_bits": random.random_bits,
    "random_seed": random.random_bits,
    "random_split": random.random_bits,
    "random_unwrap": random.key_data,
    "random_wrap": random.key_data,
    "reduce": contraction.reduce,
    "reduce_and": contraction.reduce,
    "reduce_max": contraction.reduce,
    "reduce_min": contraction.reduce,
    "reduce_or": contraction.reduce,
    "reduce_prod": contraction.reduce,
    "reduce_sum": contraction.reduce,
    "reduce_window": window.reduce_window,
    "reduce_window_max": window.reduce_window,
    "reduce_window_min": window.reduce_window,
    "reduce_window_sum": window.reduce_window,
    "reduce_xor": contraction.reduce,
    "reshape": shape.reshape,
    "rev": shape.rev,
    "scatter": indexing.scatter,
    "scatter-add": indexing.scatter_reduce,
    "scatter-max": indexing.scatter_reduce,
    "scatter-min": indexing.scatter_reduce,
    "scatter-mul": indexing.scatter_reduce,
    "scatter-sub": indexing.scatter_reduce,
    "select_and_gather_add": window.reduce_window,
    "select_and_scatter_add": window.select_and_scatter,
    "slice": shape.cut,
    "sort": contraction.sort,
    "split": shape.split,
    "squeeze": shape.reshape,
    "stack": shape.stack,
    "tile": shape.tile,
    "top_k": contraction.top_k,
    "transpose": shape.transpose,
    "unstack": shape.unstack,
}

CONSTANT_PRESERVING = ELEMENTWISE | {"broadcast_in_dim", "reshape", "slice", "squeeze", "iota"}
"""Ops whose result is a constant expression when all operands are: made anew for each use, and split as it needs."""


def rule_for(primitive: str, ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """The factor rule of an equation; None when the primitive has none."""
    if primitive in ELEMENTWISE:
        return pointwise(ins, outs)
    make = RULES.get(primitive)
    return make(ins, outs, params) if make is not None else None


def barrier(shape: Shape, allowed: str) -> Rule:
    """The rule of a barrier: an identity along which nothing flows, or one way only."""
    if allowed == "none":
        return replace(identity(1, shape), blocked=frozenset(range(len(shape))))
    return identity(1, shape, Flow[allowed.upper()])


def identity(num_operands: int, shape: Shape, flow: Flow = Flow.MOVE) -> Rule:
    """The rule of an edge: several sources and one target, all split alike."""
    return pointwise([shape] * num_operands, [shape], flow)
