"""The products of a backward pass, with their operands in the order in which XLA:CPU computes them fastest.

Differentiation multiplies the gradient of a product's result by one operand, always in this order, and transposes what
comes out where it is the gradient of the other. XLA:CPU gets rid of such a transpose by copies of both operands, and
multiplies batches of matrices fast only where the first is summed along its last dim. The sums are the same either way.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
from jax.extend.core import primitives

from ... import compat
from .equations import Equations, variables

_Operand = tuple[Any, tuple[int, ...], tuple[int, ...]]
"""An array, its dims that are summed, and those of the batch."""


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
    (left_sums, right_sums), (left_batch, right_batch) = product.params["dimension_numbers"]
    left, right = product.invars
    return _product(product, (right, right_sums, right_batch), (left, left_sums, left_batch), result)


def _product(like: Any, left: _Operand, right: _Operand, result: Any) -> Any:
    """A product of two arrays."""
    numbers = ((left[1], right[1]), (left[2], right[2]))
    precision = like.params["precision"]
    swapped = precision[::-1] if isinstance(precision, tuple) else precision
    params = {**like.params, "dimension_numbers": numbers, "precision": swapped}
    return like.replace(invars=[left[0], right[0]], outvars=[result], params=params)


def _turned(product: Any) -> list[Any]:
    """The product of the operands the other way round, with the transposes that make up for it.

    What is small is transposed before and behind, and kept as it then is: XLA would take a transpose back into the
    product, and has none that is fast for what comes of it.
    """
    (left_sums, right_sums), (left_batch, right_batch) = product.params["dimension_numbers"]
    left, right = product.invars
    ndim, num_batch = right.aval.ndim, len(right_batch)
    free = [dim for dim in range(ndim) if dim not in right_sums and dim not in right_batch]
    lying, before = _kept(product, right, (*right_batch, *free, *right_sums))
    first = (lying, tuple(range(num_batch + len(free), ndim)), tuple(range(num_batch)))
    order = _exchange(product)
    result = product.outvars[0]
    between = _permuted(result, order)
    made = _product(product, first, (left, left_sums, left_batch), between)
    held = compat.new_var(between.aval)
    back = tuple(order.index(dim) for dim in range(len(order)))
    return [*before, made, _barrier(product, between, held), _transpose(product, held, result, back)]


def _kept(like: Any, array: Any, order: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """An array with its dims in another order, and what stores it so."""
    if order == tuple(range(len(order))):
        return array, []
    moved, held = _permuted(array, order), _permuted(array, order)
    return held, [_transpose(like, array, moved, order), _barrier(like, moved, held)]


def _permuted(array: Any, order: tuple[int, ...]) -> Any:
    return compat.new_var(array.aval.update(shape=tuple(array.aval.shape[dim] for dim in order)))


def _transpose(like: Any, array: Any, result: Any, order: tuple[int, ...]) -> Any:
    return compat.new_eqn(like, [array], [result], primitives.transpose_p, {"permutation": order})


def _barrier(like: Any, array: Any, result: Any) -> Any:
    return compat.new_eqn(like, [array], [result], jax.lax.optimization_barrier_p, {})
