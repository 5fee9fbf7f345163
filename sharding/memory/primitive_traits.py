"""Fusion traits of each primitive: which ones XLA can fuse, and which are too expensive to duplicate.

After XLA:CPU's fusion pass (openxla/xla, `service/cpu/cpu_instruction_fusion.cc`).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat
from ..rules import ELEMENTWISE
from .compiler_traits import CompilerTraits

RESHAPES = frozenset("expand_dims reshape squeeze".split())
"""Primitives that only change the shape."""

DATA_MOVEMENT = frozenset(
    """
    broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather iota pad rev slice split stack tile transpose
    unstack
    """.split()
)
"""Fusible data movement: a consumer can index its operand instead."""

INDEX_REDUCTIONS = frozenset({"argmax", "argmin"})
"""Reductions to indices."""

REDUCTIONS = INDEX_REDUCTIONS | set(
    "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()
)

WINDOWS = frozenset(
    """
    cumlogsumexp cummax cummin cumprod cumsum reduce_window reduce_window_max reduce_window_min reduce_window_sum
    """.split()
)
"""Reductions of windows that move, of one that grows."""

ADDS = frozenset({"add", "add_any"})

BARRIER = "optimization_barrier"
"""Its results are its operands, none available before all are."""

IDENTITIES = frozenset(
    """
    annotate barrier copy copy_p device_put name optimization_barrier pbroadcast pvary reshard same sharding_constraint
    """.split()
)
"""Primitives whose results are their operands."""

CONSTRAINTS = frozenset({"annotate", "reshard", "sharding_constraint"})
"""Identities that XLA's partitioner sees."""

COLLECTIVES = {
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "all_to_all": "all-to-all", "pmax": "all-reduce",
    "pmin": "all-reduce", "ppermute": "collective-permute", "psum": "all-reduce", "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
}  # fmt: skip
"""Collective primitive of manual code -> HLO opcode."""


def manual_axes(eqn: Any) -> tuple[str, ...]:
    """The mesh axes of a collective of manual code."""
    given = eqn.params.get("axes") or eqn.params.get("axis_name") or ()
    return tuple(axis for axis in (given if isinstance(given, tuple) else (given,)) if isinstance(axis, str))


def masks_rows(eqn: Any) -> bool:
    """Whether an equation is a gather that masks rows which are out of bounds.

    XLA:GPU all-reduces partial sums of those and then slices; XLA:TPU slices first.
    """
    return eqn.primitive.name == "gather" and eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP


def gathers_rows(eqn: Any) -> bool:
    """Whether an equation is a gather at several indices; at one it is a slice."""
    if eqn.primitive.name != "gather":
        return False
    return math.prod(eqn.outvars[0].aval.shape) > math.prod(eqn.params["slice_sizes"])


def dilates(eqn: Any) -> bool:
    """Whether an equation pads between elements, as an interleaving does."""
    return eqn.primitive.name == "pad" and any(interior > 0 for _, _, interior in eqn.params["padding_config"])


def reverses_lanes(eqn: Any) -> bool:
    """Whether an equation reverses the last dim."""
    return eqn.primitive.name == "rev" and eqn.outvars[0].aval.ndim - 1 in eqn.params["dimensions"]


def strided_dims(eqn: Any) -> tuple[int, ...]:
    """The dims, counted from the last, of which an equation takes elements at a distance."""
    strides = eqn.params["strides"] if eqn.primitive.name == "slice" else None
    return tuple(d - len(strides) for d, stride in enumerate(strides) if stride > 1) if strides else ()


SLICES = frozenset({"slice", "dynamic_slice"})
"""What a kernel reads at one place."""
CONVERSIONS = frozenset({"bitcast_convert_type", "convert_element_type"})


@cache
def is_elementwise(name: str) -> bool:
    """Whether each element of the result depends only on the operands' elements at the same index."""
    return name in ELEMENTWISE or name in CONVERSIONS


@cache
def is_fusible(name: str) -> bool:
    """Whether a consumer may compute it inside its own kernel."""
    return is_elementwise(name) or name in DATA_MOVEMENT or name in REDUCTIONS or name in RESHAPES


@cache
def updates(name: str) -> bool:
    """Whether it writes into its first operand."""
    return name == "dynamic_update_slice" or name.startswith("scatter")


@cache
def element_bytes(dtype: Any) -> float:
    """Bytes per element; those of less than 8 bits are packed, and cotangents of integers (float0) are booleans."""
    if dtype == jax.dtypes.float0:
        return 1
    if dtype.itemsize > 1 or compat.is_extended(dtype) or jnp.issubdtype(dtype, jnp.bool_):
        return int(dtype.itemsize)
    found = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return found.bits / 8 if found.bits < 8 else 1


def stores_constant(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a constant operand of this shape is stored in memory; otherwise the op's kernel computes it."""
    one_array = name in REDUCTIONS or name in RESHAPES
    return one_array or (bool(shape) and not is_fusible(name))


def is_expensive(name: str, eqn: Any, traits: CompilerTraits) -> bool:
    """Whether a compiler does not duplicate it into several consumers."""
    if name == "convert_element_type":
        rounds = str(eqn.outvars[0].aval.dtype) == "bfloat16" and str(eqn.invars[0].aval.dtype) == "float32"
        return traits.widens_16_bits and rounds
    if name == "div" and compat.is_literal(eqn.invars[1]):
        return False  # a product with the inverse
    return name in traits.stored_once or name in REDUCTIONS or name in WINDOWS
