"""The table: one factor rule per primitive.

An op whose primitive is not listed stops the flow: its results start without a split, and the pass says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import collective, contraction, indexing, linalg, notation, random, shape, user, window
from .rule import Flow, Rule, Shape, pointwise

MakeRule = Callable[[Sequence[Shape], Sequence[Shape], Mapping[str, Any]], Rule | None]
"""(operand shapes, result shapes, the equation's parameters) -> its rule."""

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log log1p log2 logistic lt
    lt_to max min mul mulhi name ne neg nextafter not one_minus_square or philox2x32 philox4x32 polygamma polynomial
    population_count pow pvary random_clone random_fold_in random_gamma random_gamma_grad real reduce_precision
    regularized_incomplete_beta rem reshard round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 threefry4x32
    xla_metadata_value xor zeros_like zeta
    """.split()
)

MOVES = frozenset(
    """
    copy_p device_put optimization_barrier pbroadcast pin pmax pmin ppermute preduced psum psum_invariant
    reduced_vary_cast unpin unreduced_pmax unreduced_pmin unreduced_psum vary_unreduced_cast
    with_memory_space_constraint
    """.split()
)
"""Ops of n operands and n results, each result split as its operand."""

SCALED_MATMUL = notation.parse("b m (k s), b n (k s), b m k, b n k -> b m n")
"""Blocks of s numbers share a scale."""


def _scaled_matmul(ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule:
    del params
    return SCALED_MATMUL.rule(ins, outs)


def _custom_partitioning(ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """The rule that its author gave to `def_partition`; a function, which makes Shardy's own types, is not read."""
    rule = params.get("sharding_rule")
    if rule is None or callable(rule):
        return None
    return notation.from_sdy(rule).rule(ins, outs)


RULES: dict[str, MakeRule] = {
    "all_gather": collective.gathered,
    "all_gather_invariant": collective.gathered,
    "all_gather_reduced": collective.gathered,
    "all_to_all": collective.gathered,
    "approx_top_k": contraction.approx_top_k,
    "argmax": contraction.reduce,
    "argmin": contraction.reduce,
    "bitcast_convert_type": shape.bitcast_convert_type,
    "broadcast_in_dim": shape.broadcast_in_dim,
    "cholesky": linalg.batched(2),
    "cholesky_update": linalg.batched(2),
    "concatenate": shape.concatenate,
    "conv_general_dilated": contraction.conv_general_dilated,
    "cumlogsumexp": contraction.cumulative,
    "cummax": contraction.cumulative,
    "cummin": contraction.cumulative,
    "cumprod": contraction.cumulative,
    "cumsum": contraction.cumulative,
    "custom_partitioning": _custom_partitioning,
    "dot_general": contraction.dot_general,
    "dynamic_slice": indexing.dynamic_slice,
    "dynamic_update_slice": indexing.dynamic_update_slice,
    "eig": linalg.batched(2),
    "eigh": linalg.batched(2),
    "fft": linalg.fft,
    "from_edtype": random.key_data,
    "gather": indexing.gather,
    "geqp3": linalg.batched(2),
    "geqrf": linalg.batched(2),
    "hessenberg": linalg.batched(2),
    "householder_product": linalg.batched(2),
    "iota": shape.iota,
    "iota_2x32_shape": random.drawn_together,
    "lu": linalg.batched(2),
    "lu_pivots_to_permutation": linalg.batched(1),
    "ormqr": linalg.batched(2),
    "pad": shape.cut,
    "qr": linalg.batched(2),
    "ragged_dot_general": contraction.ragged_dot_general,
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
    "reduce_scatter": collective.gathered,
    "reduce_sum": contraction.reduce,
    "reduce_window": window.reduce_window,
    "reduce_window_max": window.reduce_window,
    "reduce_window_min": window.reduce_window,
    "reduce_window_sum": window.reduce_window,
    "reduce_xor": contraction.reduce,
    "reshape": shape.reshape,
    "rev": shape.rev,
    "rng_bit_generator": random.random_bits_with_key,
    "rng_uniform": random.drawn_together,
    "scaled_dot": contraction.scaled_dot,
    "scaled_matmul": _scaled_matmul,
    "scaled_matmul_wrapper": _scaled_matmul,
    "scatter": indexing.scatter,
    "scatter-add": indexing.scatter_reduce,
    "scatter-max": indexing.scatter_reduce,
    "scatter-min": indexing.scatter_reduce,
    "scatter-mul": indexing.scatter_reduce,
    "scatter-sub": indexing.scatter_reduce,
    "schur": linalg.batched(2),
    "select_and_gather_add": window.reduce_window,
    "select_and_scatter_add": window.select_and_scatter,
    "slice": shape.cut,
    "sort": contraction.sort,
    "split": shape.split,
    "squeeze": shape.reshape,
    "stack": shape.stack,
    "svd": linalg.batched(2),
    "symmetric_product": linalg.batched(2),
    "tile": shape.tile,
    "to_edtype": random.key_data,
    "top_k": contraction.top_k,
    "transpose": shape.transpose,
    "triangular_solve": linalg.batched(2),
    "tridiagonal": linalg.batched(2),
    "tridiagonal_solve": linalg.batched(1),
    "unreduced_reduce_scatter": collective.gathered,
    "unstack": shape.unstack,
}

CONSTANT_PRESERVING = ELEMENTWISE | {"broadcast_in_dim", "reshape", "slice", "squeeze", "iota"}
"""Ops whose result is a constant expression when all operands are: made anew for each use, and split as it needs."""


def rule_for(primitive: str, ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """The factor rule of an equation; None when the primitive has none."""
    if user.has(primitive, params):
        return user.rule_for(primitive, ins, outs, params)
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
