"""Gathers and scatters whose indices count along a batch dim, as ones with that batch dim.

In `logits[jnp.arange(batch), labels]` each row is read at an index of its own row: with rows sharded, nothing has to
move. Written with an index for both dims, as JAX does, only the numbers say so.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .. import compat
from .known_indices import Index

SCATTERS = frozenset({"scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"})


def batched(eqn: Any, indices: Index | None) -> list[Any]:
    """The equations that compute the same with batch dims; the equation itself if it has none to find.

    Args:
        eqn: an equation.
        indices: what is known of its second operand.
    """
    is_gather = eqn.primitive.name == "gather"
    if not (is_gather or eqn.primitive.name in SCATTERS) or not isinstance(indices, tuple):
        return [eqn]
    numbers, (operand, rows) = eqn.params["dimension_numbers"], eqn.invars[:2]
    indexed = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
    single = numbers.collapsed_slice_dims if is_gather else numbers.inserted_window_dims
    along = numbers.start_indices_batching_dims if is_gather else numbers.scatter_indices_batching_dims
    pairs = dict(zip(numbers.operand_batching_dims, along, strict=True))
    rest: list[int] = []
    for column, dim in enumerate(indexed):
        counted = indices[column if len(indices) > 1 else 0]
        is_new = counted is not None and counted not in pairs.values() and dim in single
        if is_new and rows.aval.shape[counted] == operand.aval.shape[dim]:
            pairs[dim] = counted
        else:
            rest.append(column)
    steps = {*np.diff(rest).tolist()}
    if len(rest) in (0, len(indexed)) or len(steps) > 1:
        return [eqn]
    last, step = len(rows.aval.shape) - 1, max(steps, default=1)
    columns = jax.make_jaxpr(lambda x: jax.lax.slice_in_dim(x, rest[0], rest[-1] + 1, step, axis=last))(rows.aval)
    (select,) = compat.open_jaxpr(columns).eqns
    chosen = compat.new_var(select.outvars[0].aval)
    new_indexed, new_single = tuple(indexed[c] for c in rest), tuple(d for d in single if d not in pairs)
    dims = tuple(sorted(pairs))
    if is_gather:
        numbers = numbers._replace(
            start_index_map=new_indexed,
            collapsed_slice_dims=new_single,
            operand_batching_dims=dims,
            start_indices_batching_dims=tuple(pairs[d] for d in dims),
        )
    else:
        numbers = numbers._replace(
            scatter_dims_to_operand_dims=new_indexed,
            inserted_window_dims=new_single,
            operand_batching_dims=dims,
            scatter_indices_batching_dims=tuple(pairs[d] for d in dims),
        )
    params = eqn.params | {"dimension_numbers": numbers, "indices_are_sorted": False}
    return [
        compat.new_eqn(eqn, [rows], [chosen], select.primitive, select.params),
        eqn.replace(invars=[operand, chosen, *eqn.invars[2:]], params=params),
    ]
