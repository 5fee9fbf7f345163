"""A vocabulary that an axis splits: rows of the embedding's table, and columns of the logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShardingError
from .axis import check_dtype, check_ndim, size_of, split_dim


def embed(table: jax.Array, tokens: jax.Array, *, axis: str = "tensor") -> jax.Array:
    """The rows of a table for some tokens; each device looks up those that it has, one sum over the axis joins them.

    The gradient of the table needs no communication over the axis.

    Args:
        table: [vocabulary, features], split by rows. Where the axis does not divide them it is padded, with a warning;
            ``padded_vocabulary`` says how many rows divide.
        tokens: integers [...]; those beyond the ends are taken for the last or first row.
        axis: of the mesh.

    Returns:
        [..., features].

    Raises:
        ShardingError: no mesh in force, no such axis, a table of other dims, tokens that are no integers.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2104.04473), section 2.3;
        Shoeybi et al., Megatron-LM (1909.08053), section 3.
    """
    asked = f"tensor.embed(table, tokens, axis={axis!r})"
    size_of(asked, axis)
    check_ndim(asked, "table", table, 2, 2)
    check_dtype(asked, "tokens", tokens, np.integer, "integers")
    return jnp.take(split_dim(table, axis, 0), tokens, axis=0, mode="clip")


def logits(x: jax.Array, table: jax.Array, *, axis: str = "tensor", vocab: int | None = None) -> jax.Array:
    """The logits of every token, which stay split over the vocabulary: no communication.

    In the backward one sum of `x`'s size over the axis.

    Args:
        x: [..., features], whole over the axis; see ``gathered`` where its length is split.
        table: [vocabulary, features] as in ``embed``, which may be the same.
        axis: of the mesh.
        vocab: how many of the tokens there are where the table is padded; the others' logits are -inf.

    Returns:
        [..., vocabulary], of `x`'s type.

    Raises:
        ShardingError: no mesh in force, no such axis, shapes that don't fit.
    """
    asked = f"tensor.logits(x, table, axis={axis!r})"
    size_of(asked, axis)
    check_ndim(asked, "table", table, 2, 2)
    if x.ndim < 1 or x.shape[-1] != table.shape[1]:
        there = f"x {x.shape}, table {table.shape}"
        raise ShardingError(asked, there=there, must="x is [..., features] and the table [vocabulary, features]")
    found = jnp.einsum("...M,VM->...V", x, split_dim(table, axis, 0).astype(x.dtype))
    return masked(asked, split_dim(found, axis, -1), vocab)


def padded_vocabulary(vocab: int, *, axis: str = "tensor", multiple_of: int = 1) -> int:
    """The least number of rows, at least `vocab`, of which each device of an axis gets a multiple of `multiple_of`.

    Example:
        >>> import sharding
        >>> with sharding.mesh(devices=8, tensor=8):
        ...     padded_vocabulary(50_257, multiple_of=128)
        51200
    """
    asked = f"tensor.padded_vocabulary({vocab}, axis={axis!r})"
    if vocab < 1 or multiple_of < 1:
        raise ShardingError(asked, there=f"vocab={vocab}, multiple_of={multiple_of}", must="both are at least 1")
    step = size_of(asked, axis) * multiple_of
    return -(-vocab // step) * step


def masked(asked: str, found: jax.Array, vocab: int | None) -> jax.Array:
    """Logits [..., V] of which those behind the first `vocab` are -inf."""
    if vocab is None or vocab == found.shape[-1]:
        return found
    if not 1 <= vocab < found.shape[-1]:
        there = f"vocab={vocab}, logits of shape {found.shape}"
        raise ShardingError(asked, there=there, must="a padded vocabulary is longer than what is in it")
    token = jax.lax.broadcasted_iota(jnp.int32, found.shape, found.ndim - 1)
    return jnp.where(token < vocab, found, jnp.asarray(-jnp.inf, found.dtype))
