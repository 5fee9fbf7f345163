"""Gathers and scatters whose indices count along a batch dim, as ones with that batch dim.

In `logits[jnp.arange(batch), labels]` each row is read at an index of its own row: with rows sharded, nothing has to
move. Written with an index for both dims, as JAX does, only the numbers say so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from .equations import traced
from .known_indices import Known, of_atom

GATHER = ("start_index_map", "collapsed_slice_dims", "operand_batching_dims", "start_indices_batching_dims")
SCATTER = (
    "scatter_dims_to_operand_dims", "inserted_window_dims", "operand_batching_dims", "scatter_indices_batching_dims"
)  # fmt: skip
SCATTERS = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")
FIELDS = {"gather": GATHER, **dict.fromkeys(SCATTERS, SCATTER)}
"""Primitive -> its dimension numbers: the operand's dims that are indexed, those of which a single element is taken,
and the batch dims of the operand and of the indices."""


def batched(eqn: Any, known: Known) -> list[Any]:
    """The equations that compute the same with batch dims; the equation itself if it has none to find.

    Args:
        eqn: an equation.
        known: what is known of its operands.
    """
    fields = FIELDS.get(eqn.primitive.name)
    indices = None if fields is None else of_atom(eqn.invars[1], known)
    if fields is None or not isinstance(indices, tuple):
        return [eqn]
    numbers, (operand, rows) = eqn.params["dimension_numbers"], eqn.invars[:2]
    indexed, single, *batch_dims = (getattr(numbers, field) for field in fields)
    pairs = dict(zip(*batch_dims, strict=True))
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
    columns = partial(jax.lax.slice_in_dim, start_index=rest[0], limit_index=rest[-1] + 1, stride=step, axis=last)
    select = traced(eqn, columns, [rows])
    dims = tuple(sorted(pairs))
    new = tuple(indexed[c] for c in rest), tuple(d for d in single if d not in pairs), dims, tuple(map(pairs.get, dims))
    numbers = numbers._replace(**dict(zip(fields, new, strict=True)))
    params = eqn.params | {"dimension_numbers": numbers, "indices_are_sorted": False}
    return [select, eqn.replace(invars=[operand, *select.outvars, *eqn.invars[2:]], params=params)]
