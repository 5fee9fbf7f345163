"""Vocab-parallel embedding and logits (Megatron-LM): table rows and logit columns sharded over an axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShardingError
from .tensor_axis import axis_size, check_dtype, check_ndim, shard_dim


def embed(table: jax.Array, tokens: jax.Array, *, axis: str = "tensor") -> jax.Array:
    """Vocab-parallel embedding lookup: each device looks up its own rows, one all-reduce over the axis combines them.

    The gradient of the table needs no communication over the axis.

    Args:
        table: [vocabulary, features], sharded by rows. If the axis does not divide them, the table is padded with a
            warning; ``padded_vocabulary`` gives a divisible number of rows.
        tokens: integers [...], clipped to the table.
        axis: mesh axis.

    Returns:
        [..., features].

    Raises:
        ShardingError: no mesh in context, no such axis, a table that is not 2-D, or non-integer tokens.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2104.04473), section 2.3;
        Shoeybi et al., Megatron-LM (1909.08053), section 3.
    """
    asked = f"tensor.embed(table, tokens, axis={axis!r})"
    axis_size(asked, axis)
    check_ndim(asked, "table", table, 2)
    check_dtype(asked, "tokens", tokens, np.integer, "integers")
    return jnp.take(shard_dim(table, axis, 0), tokens, axis=0, mode="clip")


def logits(x: jax.Array, table: jax.Array, *, axis: str = "tensor", vocab: int | None = None) -> jax.Array:
    """Vocab-parallel logits, sharded over the vocabulary.

    No communication forward; one all-reduce of `x`'s size over the axis backward.

    Args:
        x: [..., features], replicated over the axis; use ``gathered`` first if its length is sharded.
        table: [vocabulary, features]; may be tied to that of ``embed``.
        axis: mesh axis.
        vocab: true vocabulary size of a padded table; logits of the padding are -inf.

    Returns:
        [..., vocabulary], of `x`'s dtype.

    Raises:
        ShardingError: no mesh in context, no such axis, or mismatched shapes.
    """
    asked = f"tensor.logits(x, table, axis={axis!r})"
    axis_size(asked, axis)
    check_ndim(asked, "table", table, 2)
    if x.ndim < 1 or x.shape[-1] != table.shape[1]:
        required = "x of shape [..., features], table [vocabulary, features]"
        raise ShardingError(asked, found=f"x {x.shape}, table {table.shape}", required=required)
    y = jnp.einsum("...M,VM->...V", x, shard_dim(table, axis, 0).astype(x.dtype))
    return mask_padding(asked, shard_dim(y, axis, -1), vocab)


def padded_vocabulary(vocab: int, *, axis: str = "tensor", multiple_of: int = 1) -> int:
    """The smallest number of rows >= `vocab` that gives each device of an axis a multiple of `multiple_of`.

    Example:
        >>> import sharding
        >>> with sharding.mesh(devices=8, tensor=8):
        ...     padded_vocabulary(50_257, multiple_of=128)
        51200
    """
    asked = f"tensor.padded_vocabulary({vocab}, axis={axis!r})"
    if vocab < 1 or multiple_of < 1:
        raise ShardingError(asked, found=f"vocab={vocab}, multiple_of={multiple_of}", required="both at least 1")
    step = axis_size(asked, axis) * multiple_of
    return -(-vocab // step) * step


def mask_padding(asked: str, logits: jax.Array, vocab: int | None) -> jax.Array:
    """Logits [..., V] with all but the first `vocab` set to -inf."""
    if vocab is None or vocab == logits.shape[-1]:
        return logits
    if not 1 <= vocab < logits.shape[-1]:
        found = f"vocab={vocab}, logits of shape {logits.shape}"
        raise ShardingError(asked, found=found, required=f"vocab from 1 to {logits.shape[-1]}")
    token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(token < vocab, logits, jnp.asarray(-jnp.inf, logits.dtype))
