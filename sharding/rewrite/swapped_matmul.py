"""Matmuls with their operands in the other order, whose results are transposed."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Operand = tuple[Any, tuple[int, ...], tuple[int, ...]]
"""An array, its contracted dims, and its batch dims."""


def swap_permutation(product: Any) -> tuple[int, ...]:
    """The permutation of a product's dims that moves those of its second operand before those of its first."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    first = product.invars[0].aval.ndim - len(contracted)
    ndim = product.outvars[0].aval.ndim
    return (*range(len(batch)), *range(first, ndim), *range(len(batch), first))


def swapped(product: Any, result: Any) -> Any:
    """The product of the swapped operands."""
    (left_sums, right_sums), (left_batch, right_batch) = product.params["dimension_numbers"]
    left, right = product.invars
    return product_of(product, (right, right_sums, right_batch), (left, left_sums, left_batch), result)


def product_of(like: Any, left: Operand, right: Operand, result: Any) -> Any:
    """The matmul of the operands of another one in the other order."""
    numbers = ((left[1], right[1]), (left[2], right[2]))
    precision = like.params["precision"]
    swapped = precision[::-1] if isinstance(precision, tuple) else precision
    params = {**like.params, "dimension_numbers": numbers, "precision": swapped}
    if (sharding := params.get("out_sharding")) is not None:
        dims = (*sharding.spec, *[None] * (result.aval.ndim - len(sharding.spec)))
        spec = P(*(dims[dim] for dim in swap_permutation(like)))
        params["out_sharding"] = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return like.replace(invars=[left[0], right[0]], outvars=[result], params=params)
