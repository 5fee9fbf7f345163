"""What XLA makes of each primitive on one device, as far as it decides what is stored.

After XLA:CPU's fusion pass (openxla/xla, `service/cpu/cpu_instruction_fusion.cc`): which ops are computed element by
element, and which of those are too dear to be computed once per consumer.
"""

from __future__ import annotations

from typing import Any

from ..rules import ELEMENTWISE
from .instruction import Instruction

RESHAPES = frozenset("expand_dims reshape squeeze".split())
"""The same bytes under another shape."""

SHAPES = frozenset(
    """
    broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather iota pad rev slice split stack tile transpose
    unstack
    """.split()
)
"""Moves of elements that a consumer can do for itself."""

REDUCTIONS = frozenset("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split())

EXPENSIVE = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cosh digamma div erf erf_inv erfc exp exp2 expm1
    gather igamma igammac lgamma log log1p log2 logistic pow random_gamma regularized_incomplete_beta rem rsqrt sinh
    sqrt tanh threefry2x32 threefry4x32
    """.split()
)

BARRIER = "optimization_barrier"
"""Its results are its operands, none of them before all are there."""

PASSED = frozenset("copy_p pbroadcast pvary reshard same barrier".split())
"""Their results are their operands."""

REUSES = frozenset("broadcast_in_dim conv_general_dilated dot_general gather pad stack tile".split())

COLLECTIVES = {
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "all_to_all": "all-to-all", "pmax": "all-reduce",
    "pmin": "all-reduce", "ppermute": "collective-permute", "psum": "all-reduce", "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
}  # fmt: skip
"""Primitives of manual code -> what they become."""

WINDOW = 32
"""Longer dims are reduced in two rounds (`tree_reduction_rewriter.cc`), the first of which reads stored values."""


def is_elementwise(name: str) -> bool:
    """Whether each element of the result is made from the elements at its place."""
    return name in ELEMENTWISE


def is_loop(name: str) -> bool:
    """Whether it is computed element by element."""
    return name in ELEMENTWISE or name in SHAPES or name in REDUCTIONS or name in RESHAPES


def is_transposed(x: Instruction) -> bool:
    """Whether an array is what the program transposes, so that it lies as its operand did."""
    return x.eqn is not None and x.name == x.eqn.primitive.name == "transpose"


def is_stored_for(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a constant operand of some shape is stored for an op; else it is made inside it."""
    one_array = name in REDUCTIONS or name in RESHAPES
    return one_array or (bool(shape) and not is_loop(name))


def is_expensive(name: str, eqn: Any) -> bool:
    """Whether it is not computed once per consumer."""
    if name in ("div", "rem"):
        return getattr(eqn.outvars[0].aval.dtype, "kind", "f") not in "iu"
    if name == "integer_pow":
        return eqn.params["y"] < 0
    if name == "convert_element_type":
        return str(eqn.outvars[0].aval.dtype) == "bfloat16" and str(eqn.invars[0].aval.dtype) == "float32"
    return name in EXPENSIVE or name in REDUCTIONS
