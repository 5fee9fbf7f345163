"""Grouped matmul for dropless experts: each row is multiplied with the matrix of its group.

Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, arXiv:2211.15841, section 5. On TPUs it runs
JAX's `megablox` kernels, forward and backward.

Shape suffixes: T rows, E groups, M features, F features of the result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.ops import gmm

from ..errors import ShardingError
from .implementation import XLA, Candidate, backend, choose, unsupported
from .with_rule import with_rule

TILE = 128
"""Rows and features of a tile."""

IMPLEMENTATIONS = (
    Candidate(
        name="megablox",
        platforms=frozenset({"tpu"}),
        obstacle=lambda x, *_: obstacle(x),
        why="JAX's kernels, which compute the tiles of each group only",
    ),
)


def grouped_matmul(
    x_TM: jax.Array, w_EMF: jax.Array, group_sizes_E: jax.Array, *, implementation: str = "auto"
) -> jax.Array:
    """Rows of `x`, sorted by group, times the matrix of their group.

    Rows and groups are needed whole, features of either side can be sharded; M, which is contracted, is summed.

    Args:
        x_TM: [T, M].
        w_EMF: [E, M, F], of the dtype of `x`.
        group_sizes_E: integers [E], how many rows each group has, of at most T rows in all.
        implementation: `"megablox"`, JAX's Pallas kernels for TPUs; `"xla"`, `jax.lax.ragged_dot`; or `"auto"`,
            megablox on TPUs.

    Returns:
        [T, F], in the dtype of `x`; rows beyond the groups are 0.

    Raises:
        ShardingError: shapes or dtypes that don't fit; the implementation is unknown or can't take these arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> w = jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])
        >>> kernels.grouped_matmul(jnp.ones((3, 2)), w, jnp.array([1, 2]))[:, 0]
        Array([1., 3., 3.], dtype=float32)
    """
    found = f"x {x_TM.dtype}{list(x_TM.shape)}, w {w_EMF.dtype}{list(w_EMF.shape)}"
    found += f", group_sizes {group_sizes_E.dtype}{list(group_sizes_E.shape)}"
    fits = x_TM.ndim == 2 and w_EMF.ndim == 3 and x_TM.shape[1] == w_EMF.shape[1] and x_TM.dtype == w_EMF.dtype
    if not fits or group_sizes_E.shape != w_EMF.shape[:1] or not jnp.issubdtype(group_sizes_E.dtype, jnp.integer):
        raise ShardingError(
            "kernels.grouped_matmul(x, w, group_sizes)",
            found=found,
            required="x [T, M], w [E, M, F] of one dtype, integer group_sizes [E]",
        )
    chosen = choose("grouped_matmul", IMPLEMENTATIONS, implementation, x_TM, w_EMF)
    if chosen == XLA or not x_TM.size or not w_EMF.size:
        return reference(x_TM, w_EMF, group_sizes_E)
    run = with_rule(_megablox, "t m, e m f, e -> t f", need_replication=["t", "e"])
    return run(x_TM, w_EMF, group_sizes_E.astype(jnp.int32))


def reference(x_TM: jax.Array, w_EMF: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """Grouped matmul in plain JAX."""
    is_grouped = (jnp.arange(x_TM.shape[0]) < group_sizes_E.sum())[:, None]  # other rows of `ragged_dot` are undefined
    return jnp.where(is_grouped, jax.lax.ragged_dot(x_TM, w_EMF, group_sizes_E), 0)


def obstacle(x_TM: Any) -> str:
    """Why the kernels can't run, or an empty text."""
    if missing := unsupported("mosaic_tpu"):
        return missing
    return "" if x_TM.dtype in (jnp.float32, jnp.bfloat16) else "float32 or bfloat16"


def _megablox(x_TM: jax.Array, w_EMF: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    rows = x_TM.shape[0]
    # What the kernels leave unwritten, of results and gradients, is masked.
    is_grouped = (jnp.arange(rows) < group_sizes_E.sum())[:, None]
    x_padded = jnp.pad(jnp.where(is_grouped, x_TM, 0), ((0, -rows % TILE), (0, 0)))
    interpret = backend("mosaic_tpu").is_interpreted
    out: Any = gmm(x_padded, w_EMF, group_sizes_E, x_TM.dtype, (TILE,) * 3, None, None, False, interpret)
    return jnp.where(is_grouped, out[:rows], 0).astype(x_TM.dtype)
