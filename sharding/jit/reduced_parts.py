"""Reductions of stacked or concatenated arrays, as those of each, which are combined.

`jnp.stack([jnp.isfinite(g).all() for g in gradients]).all()` is how a step finds out whether to skip an update.
Compilers rewrite it so, too, and can then combine the partial results of all before they reduce them over devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from .. import compat
from ..graph.straight_line import num_uses
from .equations import SIDE_BY_SIDE, dim_of_parts, traced

COMBINE = {
    "reduce_and": (jax.lax.reduce_and, jax.lax.bitwise_and),
    "reduce_max": (jax.lax.reduce_max, jax.lax.max),
    "reduce_min": (jax.lax.reduce_min, jax.lax.min),
    "reduce_or": (jax.lax.reduce_or, jax.lax.bitwise_or),
    "reduce_sum": (jax.lax.reduce_sum, jax.lax.add),
}
"""Reduction -> the functions that reduce an array over dims, and that combine two results."""

MOST_PARTS = 1024
"""Most arrays side by side that are reduced by themselves."""


def reduced_apart(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations of a jaxpr, with each reduction of arrays that are only put side by side as one of each."""
    uses = num_uses(eqns, outvars)
    makers = {e.outvars[0]: e for e in eqns if e.primitive.name in SIDE_BY_SIDE}
    scalars = {e.outvars[0]: e.invars[0] for e in eqns if _is_of_scalar(e)}
    found: list[Any] = []
    removed: set[int] = set()
    for eqn in eqns:
        is_reduction = eqn.primitive.name in COMBINE and not compat.is_literal(eqn.invars[0])
        maker = makers.get(eqn.invars[0]) if is_reduction else None
        if maker is None or uses[eqn.invars[0]] > 1 or not _is_along(maker, eqn.params["axes"]):
            found.append(eqn)
        else:
            found += _apart(eqn, maker, scalars)
            removed.add(id(maker))
    return [e for e in found if id(e) not in removed]


def _is_along(maker: Any, axes: Sequence[int]) -> bool:
    return dim_of_parts(maker) in axes and 1 < len(maker.invars) <= MOST_PARTS


def _is_of_scalar(eqn: Any) -> bool:
    """Whether an equation makes an array of one element of a scalar."""
    is_alike = eqn.primitive.name in ("broadcast_in_dim", "reshape") and not eqn.invars[0].aval.shape
    return is_alike and math.prod(eqn.outvars[0].aval.shape) == 1


def _apart(eqn: Any, maker: Any, scalars: Mapping[Any, Any]) -> list[Any]:
    """A reduction of several arrays as equations on each, and those that combine their results."""
    reduce, combine = COMBINE[eqn.primitive.name]
    axes, along = eqn.params["axes"], dim_of_parts(maker)
    if maker.primitive.name == "stack":
        axes = tuple(d - (d > along) for d in axes if d != along)
    (result,) = eqn.outvars
    with compat.beside(eqn):
        (both,) = compat.open_jaxpr(jax.make_jaxpr(combine)(result.aval, result.aval)).eqns
    found: list[Any] = []
    total: Any = None
    for k, part in enumerate(maker.invars):
        one = part
        if not result.aval.shape and not compat.is_literal(part) and part in scalars:
            one = scalars[part]
        elif axes:
            found.append(traced(eqn, lambda x: reduce(x, axes), [part]))
            (one,) = found[-1].outvars
        if total is None:
            total = one
            continue
        is_last = k == len(maker.invars) - 1
        combined = result if is_last else jex.Var(both.outvars[0].aval)
        found.append(compat.new_eqn(eqn, [total, one], [combined], both.primitive, both.params))
        total = combined
    return found
