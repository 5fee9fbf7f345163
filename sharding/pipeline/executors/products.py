"""The products of a backward pass, with their operands in the order in which XLA:CPU computes them fastest.

Differentiation multiplies the gradient of a product's result by one operand, always in this order, and transposes what
comes out where it is the gradient of the other. XLA:CPU gets rid of such a transpose by copies of both operands. The
sums are the same in either order.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from jax.extend.core import primitives

from ... import compat
from .equations import Equations, variables


def ordered(program: Equations) -> Equations:
    """The same program with fewer transposes of what is large."""
    uses = Counter(variables([*program.outputs, *(atom for eqn in program.eqns for atom in eqn.invars)]))
    products = {eqn.outvars[0]: eqn for eqn in program.eqns if _may_swap(eqn) and uses[eqn.outvars[0]] == 1}
    turned = {eqn: products[eqn.invars[0]] for eqn in program.eqns if _turns(eqn, products)}
    gone = set(turned.values())
    eqns: list[Any] = []
    for eqn in program.eqns:
        if eqn in turned:
            eqns.append(_swapped(turned[eqn], eqn.outvars[0]))
        elif eqn not in gone:
            eqns += _turned(eqn) if _may_swap(eqn) and _has_large_first(eqn) else [eqn]
    return program.part(program.inputs, program.outputs, eqns)


def _may_swap(eqn: Any) -> bool:
    """Whether it is a product whose result is laid out by its operands alone."""
    return eqn.primitive.name == "dot_general" and eqn.params.get("out_sharding") is None


def _turns(eqn: Any, products: dict[Any, Any]) -> bool:
    """Whether it makes of a product without batch dims that of its operands the other way round."""
    product = products.get(eqn.invars[0]) if eqn.primitive.name == "transpose" else None
    if product is None or product.params["dimension_numbers"][1][0]:
        return False
    return tuple(eqn.params["permutation"]) == _exchange(product)


def _has_large_first(eqn: Any) -> bool:
    """Whether the first of a batch of matrices has to be transposed, and is larger than the second and the result."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (atom.aval for atom in eqn.invars)
    if not batch or left.ndim - 1 in contracted:
        return False
    return math.prod(left.shape) > math.prod(right.shape) + math.prod(eqn.outvars[0].aval.shape)


def _exchange(product: Any) -> tuple[int, ...]:
    """The permutation of a product's dims that puts those of its second operand before those of its first."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    first = product.invars[0].aval.ndim - len(contracted)
    ndim = product.outvars[0].aval.ndim
    return (*range(len(batch)), *range(first, ndim), *range(len(batch), first))


def _swapped(product: Any, result: Any) -> Any:
    """The product of the operands the other way round."""
    (contracted, batch), precision = product.params["dimension_numbers"], product.params["precision"]
    params = {
        **product.params,
        "dimension_numbers": (contracted[::-1], batch[::-1]),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    return product.replace(invars=product.invars[::-1], outvars=[result], params=params)


def _turned(product: Any) -> list[Any]:
    """The product of the operands the other way round, and the transpose that makes up for it."""
    result = product.outvars[0]
    order = _exchange(product)
    between = compat.new_var(result.aval.update(shape=tuple(result.aval.shape[dim] for dim in order)))
    swapped = _swapped(product, between)
    back = tuple(order.index(dim) for dim in range(len(order)))
    return [swapped, compat.new_eqn(product, [between], [result], primitives.transpose_p, {"permutation": back})]
