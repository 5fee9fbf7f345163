"""Exchange of token rows with the devices of their experts, inside a `shard_map`, for dropless experts.

Each device has R rows, sorted by expert. It receives a block of R rows from each of the P devices along the axis,
filled from the start: R is the most that a device can send. A ragged all-to-all sends only actual rows; platforms
without one send padded blocks.
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
"""(rows sorted by expert, number of rows per expert) -> as many rows."""


def run_on_expert_devices(
    rows_RM: jax.Array, count_E: jax.Array, compute: Compute, *, axis: str, parts: int, ragged: bool
) -> jax.Array:
    """`compute` of each row on the device of its expert, [R, M]; 0 for rows after the last expert's.

    Args:
        rows_RM: local rows sorted by expert.
        count_E: number of local rows for each of all experts.
        compute: applies the experts of one device.
        axis: mesh axis of the experts.
        parts: size of the axis.
        ragged: whether to use a ragged all-to-all.
    """
    counts_PE = jax.lax.all_gather(count_E, axis)
    sizes_PP = counts_PE.reshape(parts, parts, -1).sum(-1)  # [from, to]
    received_PRM: Any = _send(rows_RM, sizes_PP, axis, ragged)
    own = count_E.shape[0] // parts
    count_Pe = jax.lax.dynamic_slice_in_dim(counts_PE, jax.lax.axis_index(axis) * own, own, axis=1)
    order = jnp.argsort(_experts_of(count_Pe, len(rows_RM)).reshape(-1), stable=True)
    out = compute(received_PRM.reshape(-1, rows_RM.shape[1])[order], count_Pe.sum(0))
    return _send_back(out[jnp.argsort(order)].reshape(received_PRM.shape), sizes_PP, axis, ragged)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _send(rows_RM: jax.Array, sizes_PP: jax.Array, axis: str, ragged: bool) -> jax.Array:
    """Received rows [P, R, M], one block per source device."""
    return (_send_ragged if ragged else _send_padded)(rows_RM, sizes_PP, jax.lax.axis_index(axis), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _send_back(out_PRM: jax.Array, sizes_PP: jax.Array, axis: str, ragged: bool) -> jax.Array:
    """Rows returned to their source devices, [R, M]."""
    return (_send_back_ragged if ragged else _send_back_padded)(out_PRM, sizes_PP, jax.lax.axis_index(axis), axis)


# Each is the other's transpose. JAX's transpose of a ragged all-to-all would first exchange its offsets.
_send.defvjp(
    lambda rows_RM, sizes_PP, axis, ragged: (_send(rows_RM, sizes_PP, axis, ragged), sizes_PP),
    lambda axis, ragged, sizes_PP, received_PRM: (_send_back(received_PRM, sizes_PP, axis, ragged), None),
)
_send_back.defvjp(
    lambda out_PRM, sizes_PP, axis, ragged: (_send_back(out_PRM, sizes_PP, axis, ragged), sizes_PP),
    lambda axis, ragged, sizes_PP, received_RM: (_send(received_RM, sizes_PP, axis, ragged), None),
)


def _experts_of(count_Pe: jax.Array, rows: int) -> jax.Array:
    """Expert of each row of each block, [P, R]; an index past the last expert for padding."""
    ends_P1e = jnp.cumsum(count_Pe, axis=1)[:, None, :]
    return jnp.sum(jnp.arange(rows)[None, :, None] >= ends_P1e, axis=-1)


def _starts(sizes_P: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes_P) - sizes_P


def _send_padded(rows_RM: jax.Array, sizes_PP: jax.Array, me: jax.Array, axis: str) -> jax.Array:
    rows = len(rows_RM)
    row_PR = _starts(sizes_PP[me])[:, None] + jnp.arange(rows)[None, :]
    valid_PR = jnp.arange(rows)[None, :] < sizes_PP[me][:, None]
    block_PRM = jnp.where(valid_PR[..., None], rows_RM[jnp.minimum(row_PR, rows - 1)], 0)
    return jax.lax.all_to_all(block_PRM, axis, 0, 0)


def _send_back_padded(out_PRM: jax.Array, sizes_PP: jax.Array, me: jax.Array, axis: str) -> jax.Array:
    received_PRM = jax.lax.all_to_all(out_PRM, axis, 0, 0)
    parts, rows = received_PRM.shape[:2]
    ends_P, row_R = jnp.cumsum(sizes_PP[me]), jnp.arange(rows)
    block_R = jnp.sum(row_R[:, None] >= ends_P[None, :], axis=-1)
    offset_R = row_R - _starts(sizes_PP[me])[jnp.minimum(block_R, parts - 1)]
    received_RM = received_PRM[jnp.minimum(block_R, parts - 1), jnp.minimum(offset_R, rows - 1)]
    return jnp.where((block_R < parts)[:, None], received_RM, 0)


def _send_ragged(rows_RM: jax.Array, sizes_PP: jax.Array, me: jax.Array, axis: str) -> jax.Array:
    (rows, features), parts = rows_RM.shape, len(sizes_PP)
    sent = jax.lax.ragged_all_to_all(
        rows_RM,
        jnp.tile(jnp.zeros_like(rows_RM), (parts, 1)),
        _starts(sizes_PP[me]),
        sizes_PP[me],
        jnp.full((parts,), me * rows),  # offset of this device's block on each target
        sizes_PP[:, me],
        axis_name=axis,
    )
    return sent.reshape(parts, rows, features)


def _send_back_ragged(out_PRM: jax.Array, sizes_PP: jax.Array, me: jax.Array, axis: str) -> jax.Array:
    parts, rows, features = out_PRM.shape
    starts_PP = jnp.cumsum(sizes_PP, axis=1) - sizes_PP
    return jax.lax.ragged_all_to_all(
        out_PRM.reshape(parts * rows, features),
        jnp.zeros_like(out_PRM[0]),
        jnp.arange(parts) * rows,
        sizes_PP[:, me],
        starts_PP[:, me],  # offset of this device's rows on each target
        sizes_PP[me],
        axis_name=axis,
    )
