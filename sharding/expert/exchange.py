"""Rows of tokens to the devices that have their experts, and back: inside a `shard_map`.

Each device has R rows, in the order of their experts. What it gets from each of the P devices along the axis lies in a
block of R rows, filled from its beginning: that is the most that any can send. A ragged all-to-all sends the rows that
there are; where the platform has none, whole blocks are sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

RAGGED = ("tpu", "gpu")
"""The platforms that have `jax.lax.ragged_all_to_all`; XLA:CPU refuses it (JAX 0.10.2 and 0.12.0.1)."""

Compute = Callable[[jax.Array, jax.Array], jax.Array]
"""Rows in the order of experts, how many each has -> as many rows."""


def at_experts(
    rows_RM: jax.Array, count_E: jax.Array, compute: Compute, *, axis: str, parts: int, ragged: bool
) -> jax.Array:
    """What `compute` makes of each row on the device that has its expert, [R, M]; 0 for rows behind the last expert's.

    Args:
        rows_RM: in the order of their experts.
        count_E: how many rows each expert has, those of all devices.
        compute: for the experts of one device.
        axis: that the experts are split over.
        parts: its size.
        ragged: whether to send only the rows that there are.
    """
    counts_PE = jax.lax.all_gather(count_E, axis)
    sizes_PP = counts_PE.reshape(parts, parts, -1).sum(-1)  # [from, to]
    sent_PRM: Any = _sent(rows_RM, sizes_PP, axis, ragged)
    own = count_E.shape[0] // parts
    count_Pe = jax.lax.dynamic_slice_in_dim(counts_PE, jax.lax.axis_index(axis) * own, own, axis=1)
    order = jnp.argsort(_experts_of(count_Pe, len(rows_RM)).reshape(-1), stable=True)
    out = compute(sent_PRM.reshape(-1, rows_RM.shape[1])[order], count_Pe.sum(0))
    return _back(out[jnp.argsort(order)].reshape(sent_PRM.shape), sizes_PP, axis, ragged)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _sent(rows_RM: jax.Array, sizes_PP: jax.Array, axis: str, ragged: bool) -> jax.Array:
    """The rows that a device gets, [P, R, M]: of each device a block."""
    return (_sent_ragged if ragged else _sent_padded)(rows_RM, sizes_PP, jax.lax.axis_index(axis), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _back(out_PRM: jax.Array, sizes_PP: jax.Array, axis: str, ragged: bool) -> jax.Array:
    """The rows that it gave, as they return, [R, M]."""
    return (_back_ragged if ragged else _back_padded)(out_PRM, sizes_PP, jax.lax.axis_index(axis), axis)


# Each is the other's transpose. JAX's own of a ragged all-to-all would send its offsets around first.
_sent.defvjp(
    lambda rows_RM, sizes_PP, axis, ragged: (_sent(rows_RM, sizes_PP, axis, ragged), sizes_PP),
    lambda axis, ragged, sizes_PP, got_PRM: (_back(got_PRM, sizes_PP, axis, ragged), None),
)
_back.defvjp(
    lambda out_PRM, sizes_PP, axis, ragged: (_back(out_PRM, sizes_PP, axis, ragged), sizes_PP),
    lambda axis, ragged, sizes_PP, got_RM: (_sent(got_RM, sizes_PP, axis, ragged), None),
)


def _experts_of(count_Pe: jax.Array, rows: int) -> jax.Array:
    """The expert of each row of each block, [P, R]; a number behind the last one where there is no row."""
    ends_P1e = jnp.cumsum(count_Pe, axis=1)[:, None, :]
    return jnp.sum(jnp.arange(rows)[None, :, None] >= ends_P1e, axis=-1)


def _starts(sizes_P: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes_P) - sizes_P


def _sent_padded(rows_RM: jax.Array, sizes_PP: jax.Array, me: jax.Array, axis: str) -> jax.Array:
    rows = len(rows_RM)
    place_PR = _starts(sizes_PP[me])[:, None] + jnp.arange(rows)[None, :]
    there_PR = jnp.arange(rows)[None, :] < sizes_PP[me][:, None]
    block_PRM = jnp.where(there_PR[..., None], rows_RM[jnp.minimum(place_PR, rows - 1)], 0)
    return jax.lax.all_to_all(block_PRM, axis, 0, 0)


def _back_padded(out_PRM: jax.Array, sizes_PP: jax.Array, me: jax.Array, axis: str) -> jax.Array:
    got_PRM = jax.lax.all_to_all(out_PRM, axis, 0, 0)
    parts, rows = got_PRM.shape[:2]
    ends_P, place_R = jnp.cumsum(sizes_PP[me]), jnp.arange(rows)
    block_R = jnp.sum(place_R[:, None] >= ends_P[None, :], axis=-1)
    inside_R = place_R - _starts(sizes_PP[me])[jnp.minimum(block_R, parts - 1)]
    got_RM = got_PRM[jnp.minimum(block_R, parts - 1), jnp.minimum(inside_R, rows - 1)]
    return jnp.where((block_R < parts)[:, None], got_RM, 0)


def _sent_ragged(rows_RM: jax.Array, sizes_PP: jax.Array, me: jax.Array, axis: str) -> jax.Array:
    (rows, features), parts = rows_RM.shape, len(sizes_PP)
    sent = jax.lax.ragged_all_to_all(
        rows_RM,
        jnp.tile(jnp.zeros_like(rows_RM), (parts, 1)),
        _starts(sizes_PP[me]),
        sizes_PP[me],
        jnp.full((parts,), me * rows),  # at each of them, the block of this one
        sizes_PP[:, me],
        axis_name=axis,
    )
    return sent.reshape(parts, rows, features)


def _back_ragged(out_PRM: jax.Array, sizes_PP: jax.Array, me: jax.Array, axis: str) -> jax.Array:
    parts, rows, features = out_PRM.shape
    starts_PP = jnp.cumsum(sizes_PP, axis=1) - sizes_PP
    return jax.lax.ragged_all_to_all(
        out_PRM.reshape(parts * rows, features),
        jnp.zeros_like(out_PRM[0]),
        jnp.arange(parts) * rows,
        sizes_PP[:, me],
        starts_PP[:, me],  # where in the order of each its rows for this one begin
        sizes_PP[me],
        axis_name=axis,
    )
