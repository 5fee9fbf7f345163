"""Table of factor rules by primitive.

Propagation stops at an op whose primitive is not listed, and it runs on replicated arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import (
    contraction,
    cudnn_attention,
    indexing,
    linalg,
    manual_collectives,
    notation,
    pooling,
    random,
    reduction,
    shape,
    sorting,
    user_rules,
)
from .partitioning_rule import partitioning_rule
from .rule import Flow, Rule, RuleBuilder, Shape, pointwise

MakeRule = Callable[[Sequence[Shape], Sequence[Shape], Mapping[str, Any]], Rule | None]
"""(operand shapes, result shapes, equation parameters) -> rule."""

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

TRANSCENDENTAL = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cosh digamma div erf erf_inv erfc exp exp2 expm1
    gather igamma igammac lgamma log log1p log2 logistic pow random_gamma regularized_incomplete_beta rem rsqrt sinh
    sqrt tanh threefry2x32 threefry4x32
    """.split()
)
"""Primitives that take many instructions per element."""

MOVES = frozenset(
    """
    copy_p device_put optimization_barrier pbroadcast pin pmax pmin ppermute preduced psum psum_invariant
    reduced_vary_cast unpin unreduced_pmax unreduced_pmin unreduced_psum vary_unreduced_cast
    with_memory_space_constraint
    """.split()
)
"""Ops with n operands and n results, where result i is sharded as operand i."""

SCALED_MATMUL = notation.parse("b m (k s), b n (k s), b m k, b n k -> b m n")
"""Blocks of s elements share a scale."""


def _scaled_matmul(ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule:
    del params
    return SCALED_MATMUL.rule(ins, outs)


def _on_shards(ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """Returns the rule of a `debug.callback` that each device calls with its shards, if it is `partitioned`."""
    return RuleBuilder(ins, outs).build() if params.get("partitioned") else None


def _kernel_call(ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule:
    return params["call"].rule.rule(ins, outs)


RULES: dict[str, MakeRule] = {
    "all_gather": manual_collectives.gather_or_scatter,
    "all_gather_invariant": manual_collectives.gather_or_scatter,
    "all_gather_reduced": manual_collectives.gather_or_scatter,
    "all_to_all": manual_collectives.gather_or_scatter,
    "approx_top_k": sorting.approx_top_k,
    "argmax": reduction.reduce,
    "argmin": reduction.reduce,
    "bitcast_convert_type": shape.bitcast_convert_type,
    "broadcast_in_dim": shape.broadcast_in_dim,
    "cholesky": linalg.batched(2),
    "cholesky_update": linalg.batched(2),
    "concatenate": shape.concatenate,
    "conv_general_dilated": contraction.conv_general_dilated,
    "cumlogsumexp": reduction.cumulative,
    "cummax": reduction.cumulative,
    "cummin": reduction.cumulative,
    "cumprod": reduction.cumulative,
    "cumsum": reduction.cumulative,
    "custom_partitioning": partitioning_rule,
    "debug_callback": _on_shards,
    "debug_print": _on_shards,
    "dot_general": contraction.dot_general,
    "dot_product_attention_bwd_wrapper": cudnn_attention.backward,
    "dot_product_attention_fwd_wrapper": cudnn_attention.forward,
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
    "iota_2x32_shape": random.generated,
    "kernel_call": _kernel_call,
    "lu": linalg.batched(2),
    "lu_pivots_to_permutation": linalg.batched(1),
    "ormqr": linalg.batched(2),
    "pad": shape.slice_or_pad,
    "qr": linalg.batched(2),
    "ragged_all_to_all": manual_collectives.ragged_all_to_all,
    "ragged_dot_general": contraction.ragged_dot_general,
    "random_bits": random.random_bits,
    "random_seed": random.random_bits,
    "random_split": random.random_bits,
    "random_unwrap": random.key_data,
    "random_wrap": random.key_data,
    "reduce": reduction.reduce,
    "reduce_and": reduction.reduce,
    "reduce_max": reduction.reduce,
    "reduce_min": reduction.reduce,
    "reduce_or": reduction.reduce,
    "reduce_prod": reduction.reduce,
    "reduce_scatter": manual_collectives.gather_or_scatter,
    "reduce_sum": reduction.reduce,
    "reduce_window": pooling.reduce_window,
    "reduce_window_max": pooling.reduce_window,
    "reduce_window_min": pooling.reduce_window,
    "reduce_window_sum": pooling.reduce_window,
    "reduce_xor": reduction.reduce,
    "reshape": shape.reshape,
    "rev": shape.rev,
    "rng_bit_generator": random.random_bits_with_key,
    "rng_uniform": random.generated,
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
    "select_and_gather_add": pooling.reduce_window,
    "select_and_scatter_add": pooling.select_and_scatter,
    "slice": shape.slice_or_pad,
    "sort": sorting.sort,
    "split": shape.split,
    "squeeze": shape.reshape,
    "stack": shape.stack,
    "svd": linalg.batched(2),
    "symmetric_product": linalg.batched(2),
    "tile": shape.tile,
    "to_edtype": random.key_data,
    "top_k": sorting.top_k,
    "transpose": shape.transpose,
    "triangular_solve": linalg.batched(2),
    "tridiagonal": linalg.batched(2),
    "tridiagonal_solve": linalg.batched(1),
    "unreduced_reduce_scatter": manual_collectives.gather_or_scatter,
    "unstack": shape.unstack,
}

PARTITIONED_BY_ITSELF = frozenset({"custom_partitioning", "shard_map"})
"""Primitives whose equations choose how they are sharded, so that without a rule they are left to XLA."""

CONSTANT_PRESERVING = ELEMENTWISE | {"broadcast_in_dim", "reshape", "slice", "squeeze", "iota"}
"""Ops whose result is a constant expression if all operands are: each use gets its own copy, sharded as needed."""


def rule_for(primitive: str, ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """Returns the factor rule of an equation, or None if its primitive has none."""
    if user_rules.has(primitive, params):
        return user_rules.rule_for(primitive, ins, outs, params)
    if primitive in ELEMENTWISE:
        return pointwise(ins, outs)
    make = RULES.get(primitive)
    return make(ins, outs, params) if make is not None else None


def barrier(shape: Shape, allowed: str) -> Rule:
    """Returns the rule of a barrier: an identity that blocks propagation, or allows it one way."""
    if allowed == "none":
        return replace(identity(1, shape), blocked=frozenset(range(len(shape))))
    return identity(1, shape, Flow[allowed.upper()])


def identity(num_operands: int, shape: Shape, flow: Flow = Flow.MOVE) -> Rule:
    """Returns the rule of an edge: several sources and one target, all sharded identically."""
    return pointwise([shape] * num_operands, [shape], flow)
