"""Products whose result is transposed, as products of the operands in the other order.

Differentiation leaves a transposition behind the gradient of each weight. Compilers drop it, too, but only where no
constraint is in between, and move what they can behind loops only where it is dropped. Dims of size 1 may be in any
place. What another product reads keeps its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex

from .. import compat
from ..graph.straight_line import num_uses
from ..rewrite.swapped_matmul import swap_permutation, swapped
from .equations import is_placed, traced


def turned(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations of a jaxpr, with each product that is only transposed to the other order computed in that order."""
    makers: dict[Any, int] = {}
    found: list[Any] = []
    uses = num_uses(eqns, outvars)
    multiplied = {v for e in eqns if e.primitive.name == "dot_general" for v in e.invars if not compat.is_literal(v)}
    for eqn in eqns:
        is_transposed = eqn.primitive.name == "transpose" and multiplied.isdisjoint(eqn.outvars)
        at = makers.get(eqn.invars[0]) if is_transposed and uses[eqn.invars[0]] == 1 else None
        new = [eqn] if at is None else _in_the_other_order(found[at], eqn)
        if at is not None and new[0] is not eqn:
            found[at], *rest = new
            found += rest
        else:
            at = len(found)
            found += new
        if new[0].primitive.name == "dot_general":
            makers[new[0].outvars[0]] = at
    return found


def _in_the_other_order(product: Any, turn: Any) -> list[Any]:
    """A product and its transposition as the swapped product, reshaped if dims of size 1 move; else the latter."""
    shape, swap, asked = product.outvars[0].aval.shape, swap_permutation(product), turn.params["permutation"]
    is_swap = [d for d in asked if shape[d] > 1] == [d for d in swap if shape[d] > 1]
    turned_shape = tuple(shape[d] for d in swap)
    if asked == swap or (is_swap and turned_shape == turn.outvars[0].aval.shape):
        return [swapped(product, turn.outvars[0])]
    if not is_swap or is_placed(product):
        return [turn]
    whole = jex.Var(product.outvars[0].aval.update(shape=turned_shape))
    return [
        swapped(product, whole),
        traced(turn, partial(jax.lax.reshape, new_sizes=turn.outvars[0].aval.shape), [whole], turn.outvars),
    ]
