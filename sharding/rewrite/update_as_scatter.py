"""`dynamic_update_slice` along a sharded dim, written as a scatter.

XLA partitions an update of one row, or at a constant start. For several rows at a start that is computed, it gathers
the whole array. Each device drops the rows of a scatter that are not its own, so nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import compat
from ..spec import Spec, num_parts


def scattered_dims(eqn: Any, spec: Spec | None, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The dims of an update for which XLA would gather the array; empty if there are none.

    Args:
        eqn: any equation.
        spec: how its result is sharded.
        sizes: the mesh axis sizes.
    """
    if eqn.primitive.name != "dynamic_update_slice" or spec is None:
        return ()
    operand, update, *starts = eqn.invars
    rows = list(zip(operand.aval.shape, update.aval.shape, starts, spec.axes, strict=True))
    if any(n == m and n % num_parts(axes, sizes) for n, m, _, axes in rows):
        return ()  # XLA would scatter the padding of an uneven dim, too
    return tuple(d for d, (n, m, at, axes) in enumerate(rows) if axes and 1 < m < n and not compat.is_literal(at))


def scattered(dims: Sequence[int], operand: jax.Array, update: jax.Array, *starts: jax.Array) -> jax.Array:
    """`lax.dynamic_update_slice(operand, update, starts)`, as a scatter along some dims."""
    others = [d for d in range(operand.ndim) if d not in dims]
    sizes = [update.shape[d] for d in dims]
    first = [
        lax.clamp(jnp.zeros_like(start), start, jnp.full_like(start, n - m))
        for start, n, m in zip(starts, operand.shape, update.shape, strict=True)
    ]
    rows = [first[d] + lax.broadcasted_iota(first[d].dtype, sizes, i) for i, d in enumerate(dims)]
    indices = jnp.stack([*rows, *(jnp.broadcast_to(first[d], sizes) for d in others)], axis=-1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(len(dims), operand.ndim)),
        inserted_window_dims=tuple(dims),
        scatter_dims_to_operand_dims=(*dims, *others),
    )
    moved = lax.transpose(update, (*dims, *others))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.scatter(operand, indices, moved, numbers, unique_indices=True, mode=mode)
