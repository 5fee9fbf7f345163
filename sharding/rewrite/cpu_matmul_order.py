"""Reorders the matmuls of a program for XLA:CPU.

Differentiation multiplies the gradient of a product's result by one operand, always in this order, and transposes the
result if it is the gradient of the other operand. XLA:CPU removes such a transpose by copying both operands. Its
matmuls are fast if the first operand is contracted along its last dims: it copies another one first, so the smaller
operand should come first. The sums are the same either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.core import primitives
from jax.sharding import AxisType

from .. import compat
from ..graph import CALLS
from ..graph.straight_line import are_same, num_uses
from .swapped_matmul import Operand, product_of, swap_permutation, swapped

REORDERED_INSIDE = CALLS | {"cond", "scan", "shard_map", "while"}
"""Primitives whose bodies are reordered, too."""


def reorder(jaxpr: Any) -> Any:
    """The jaxpr with reordered matmuls, also in its bodies; itself if nothing changes."""
    source = compat.open_jaxpr(jaxpr)
    eqns = reordered([_with_reordered_bodies(eqn) for eqn in source.eqns], source.outvars)
    return jaxpr if are_same(eqns, source.eqns) else compat.rebuild(jaxpr, eqns=eqns, outvars=source.outvars)


def reordered(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Equations that compute the same with fewer transposes of large arrays."""
    uses = num_uses(eqns, outvars)
    products = {eqn.outvars[0]: eqn for eqn in eqns if _may_swap(eqn) and uses[eqn.outvars[0]] == 1}
    swaps = {id(eqn): products[eqn.invars[0]] for eqn in eqns if _is_swap(eqn, products)}
    replaced = set(map(id, swaps.values()))
    found: list[Any] = []
    for eqn in eqns:
        if id(eqn) in replaced:
            continue
        product = swapped(swaps[id(eqn)], eqn.outvars[0]) if id(eqn) in swaps else eqn
        found += _swapped_with_barriers(product) if _may_swap(product) and _has_large_first(product) else [product]
    return found


def _with_reordered_bodies(eqn: Any) -> Any:
    params = eqn.params
    for key, position, body in compat.sub_jaxprs(params) if eqn.primitive.name in REORDERED_INSIDE else ():
        new = reorder(body)
        if new is not body:
            params = compat.with_jaxpr(params, key, position, new)
    return eqn if params is eqn.params else eqn.replace(params=params)


def _may_swap(eqn: Any) -> bool:
    """Whether it is a matmul whose result has no sharding of explicit mesh axes."""
    if eqn.primitive.name != "dot_general":
        return False
    sharding = eqn.params.get("out_sharding")
    return sharding is None or AxisType.Explicit not in sharding.mesh.axis_types


def _is_swap(eqn: Any, products: dict[Any, Any]) -> bool:
    """Whether it transposes a product without batch dims into the product of the swapped operands."""
    product = products.get(eqn.invars[0]) if eqn.primitive.name == "transpose" else None
    if product is None or product.params["dimension_numbers"][1][0]:
        return False
    return tuple(eqn.params["permutation"]) == swap_permutation(product)


def _has_large_first(eqn: Any) -> bool:
    """Whether the first operand needs a transpose and is larger than the second plus the result."""
    contracted = eqn.params["dimension_numbers"][0][0]
    left, right = (atom.aval for atom in eqn.invars)
    if not contracted or left.ndim - 1 in contracted:
        return False
    return math.prod(left.shape) > math.prod(right.shape) + math.prod(eqn.outvars[0].aval.shape)


def _swapped_with_barriers(product: Any) -> list[Any]:
    """The product of the swapped operands, with compensating transposes.

    Transposes the smaller operand and the result. A barrier keeps XLA from folding the result's transpose back into the
    product and, in batched matmuls, for which it has no fast kernel, that of the operand.
    """
    (left_sums, right_sums), (left_batch, right_batch) = product.params["dimension_numbers"]
    left, right = product.invars
    first: Operand = (right, right_sums, right_batch)
    before: list[Any] = []
    if right_batch:
        ndim, num_batch = right.aval.ndim, len(right_batch)
        free = [dim for dim in range(ndim) if dim not in right_sums and dim not in right_batch]
        stored, before = _stored_permuted(product, right, (*right_batch, *free, *right_sums))
        first = (stored, tuple(range(num_batch + len(free), ndim)), tuple(range(num_batch)))
    order = swap_permutation(product)
    result = product.outvars[0]
    between = _permuted(result, order)
    made = product_of(product, first, (left, left_sums, left_batch), between)
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
