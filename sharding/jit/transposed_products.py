"""Products whose result is transposed, as products of the operands in the other order.

Differentiation leaves a transposition behind the gradient of each weight. Compilers drop it, too, but only where no
constraint is in between, and move what they can behind loops only where it is dropped. What another product reads keeps
its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from ..graph.straight_line import num_uses


def turned(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations of a jaxpr, with each product that is only transposed to the other order computed in that order."""
    makers: dict[Any, int] = {}
    found: list[Any] = []
    uses = num_uses(eqns, outvars)
    multiplied = {v for e in eqns if e.primitive.name == "dot_general" for v in e.invars if not compat.is_literal(v)}
    for eqn in eqns:
        is_transposed = eqn.primitive.name == "transpose" and multiplied.isdisjoint(eqn.outvars)
        at = makers.get(eqn.invars[0]) if is_transposed and uses[eqn.invars[0]] == 1 else None
        if at is not None and eqn.params["permutation"] == _other_order(found[at]):
            found[at] = eqn = _swapped(found[at], eqn.outvars)
        else:
            at = len(found)
            found.append(eqn)
        if eqn.primitive.name == "dot_general":
            makers[eqn.outvars[0]] = at
    return found


def _other_order(product: Any) -> tuple[int, ...]:
    """The permutation of a product's result that gives the product of its operands in the other order."""
    (left, _), (batch, _) = product.params["dimension_numbers"]
    num_batch, ndim = len(batch), len(product.outvars[0].aval.shape)
    num_left = len(product.invars[0].aval.shape) - len(left) - num_batch
    first = num_batch + num_left
    return (*range(num_batch), *range(first, ndim), *range(num_batch, first))


def _swapped(product: Any, outvars: Sequence[Any]) -> Any:
    params = dict(product.params)
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    params["dimension_numbers"] = ((right, left), (right_batch, left_batch))
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    return product.replace(invars=product.invars[::-1], outvars=list(outvars), params=params)
