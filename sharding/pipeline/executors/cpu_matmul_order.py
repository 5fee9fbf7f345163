"""Reorders the matmuls of a backward pass for XLA:CPU.

Differentiation multiplies the gradient of a product's result by one operand, always in this order, and transposes the
result if it is the gradient of the other operand. XLA:CPU removes such a transpose by copying both operands, and its
batched matmuls are fast only if the first operand is contracted along its last dim. The sums are the same either way.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.core import primitives

from ... import compat
from ...graph.straight_line import Program, variables

_Operand = tuple[Any, tuple[int, ...], tuple[int, ...]]
"""An array, its contracted dims, and its batch dims."""


def reorder_products(program: Program) -> Program:
    """An equivalent program with fewer transposes of large arrays."""
    uses = Counter(variables([*program.outputs, *(atom for eqn in program.eqns for atom in eqn.invars)]))
    products = {eqn.outvars[0]: eqn for eqn in program.eqns if _may_swap(eqn) and uses[eqn.outvars[0]] == 1}
    swaps = {eqn: products[eqn.invars[0]] for eqn in program.eqns if _is_swap(eqn, products)}
    replaced = set(swaps.values())
    eqns: list[Any] = []
    for eqn in program.eqns:
        if eqn in swaps:
            eqns.append(_swapped(swaps[eqn], eqn.outvars[0]))
        elif eqn not in replaced:
            eqns += _swapped_with_barriers(eqn) if _may_swap(eqn) and _has_large_first(eqn) else [eqn]
    return program.subprogram(program.inputs, program.outputs, eqns)


def _may_swap(eqn: Any) -> bool:
    """Whether it is a matmul without an explicit output sharding."""
    return eqn.primitive.name == "dot_general" and eqn.params.get("out_sharding") is None


def _is_swap(eqn: Any, products: dict[Any, Any]) -> bool:
    """Whether it transposes a product without batch dims into the product of the swapped operands."""
    product = products.get(eqn.invars[0]) if eqn.primitive.name == "transpose" else None
    if product is None or product.params["dimension_numbers"][1][0]:
        return False
    return tuple(eqn.params["permutation"]) == _swap_permutation(product)


def _has_large_first(eqn: Any) -> bool:
    """Whether the first operand of a batched matmul needs a transpose and is larger than the second plus the result."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (atom.aval for atom in eqn.invars)
    if not batch or left.ndim - 1 in contracted:
        return False
    return math.prod(left.shape) > math.prod(right.shape) + math.prod(eqn.outvars[0].aval.shape)


def _swap_permutation(product: Any) -> tuple[int, ...]:
    """The permutation of a product's dims that moves those of its second operand before those of its first."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    first = product.invars[0].aval.ndim - len(contracted)
    ndim = product.outvars[0].aval.ndim
    return (*range(len(batch)), *range(first, ndim), *range(len(batch), first))


def _swapped(product: Any, result: Any) -> Any:
    """The product of the swapped operands."""
    (left_sums, right_sums), (left_batch, right_batch) = product.params["dimension_numbers"]
    left, right = product.invars
    return _product(product, (right, right_sums, right_batch), (left, left_sums, left_batch), result)


def _product(like: Any, left: _Operand, right: _Operand, result: Any) -> Any:
    """A matmul equation."""
    numbers = ((left[1], right[1]), (left[2], right[2]))
    precision = like.params["precision"]
    swapped = precision[::-1] if isinstance(precision, tuple) else precision
    params = {**like.params, "dimension_numbers": numbers, "precision": swapped}
    return like.replace(invars=[left[0], right[0]], outvars=[result], params=params)


def _swapped_with_barriers(product: Any) -> list[Any]:
    """The product of the swapped operands, with compensating transposes.

    Transposes the smaller operand and the result, each behind an optimization barrier: otherwise XLA would fold the
    transpose back into the product, for which it has no fast kernel.
    """
    (left_sums, right_sums), (left_batch, right_batch) = product.params["dimension_numbers"]
    left, right = product.invars
    ndim, num_batch = right.aval.ndim, len(right_batch)
    free = [dim for dim in range(ndim) if dim not in right_sums and dim not in right_batch]
    stored, before = _stored_permuted(product, right, (*right_batch, *free, *right_sums))
    first = (stored, tuple(range(num_batch + len(free), ndim)), tuple(range(num_batch)))
    order = _swap_permutation(product)
    result = product.outvars[0]
    between = _permuted(result, order)
    made = _product(product, first, (left, left_sums, left_batch), between)
    stored_result = jex.Var(between.aval)
    back = tuple(order.index(dim) for dim in range(len(order)))
    return [*before, made, _barrier(product, between, stored_result), _transpose(product, stored_result, result, back)]


def _stored_permuted(like: Any, array: Any, order: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """An array with permuted dims, and the equations that store it in this order."""
    if order == tuple(range(len(order))):
        return array, []
    moved, stored_result = _permuted(array, order), _permuted(array, order)
    return stored_result, [_transpose(like, array, moved, order), _barrier(like, moved, stored_result)]


def _permuted(array: Any, order: tuple[int, ...]) -> Any:
    return jex.Var(array.aval.update(shape=tuple(array.aval.shape[dim] for dim in order)))


def _transpose(like: Any, array: Any, result: Any, order: tuple[int, ...]) -> Any:
    return compat.new_eqn(like, [array], [result], primitives.transpose_p, {"permutation": order})


def _barrier(like: Any, array: Any, result: Any) -> Any:
    return compat.new_eqn(like, [array], [result], jax.lax.optimization_barrier_p, {})
