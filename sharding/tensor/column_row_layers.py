"""Column- and row-parallel linear layers, the two layers of a branch (Megatron-LM).

The first is sharded over its output features, the second over its input features, with no communication between them.
In the backward pass they swap roles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..errors import ShardingError
from .tensor_axis import check_divides, shard_dim


def column_parallel(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, *, axis: str = "tensor") -> jax.Array:
    """`x @ w + bias` with the first output dim (features or attention heads) sharded over an axis.

    No communication forward; one all-reduce of `x`'s size over the axis backward.

    Args:
        x: [..., in], replicated over the axis; use ``gathered`` first if its length is sharded.
        w: [in, *out]; the first dim of `out` is sharded.
        bias: [*out], sharded like `w`.
        axis: mesh axis.

    Returns:
        [..., *out].

    Raises:
        ShardingError: no mesh in context, no such axis, mismatched shapes, or indivisible features.

    References:
        Shoeybi et al., Megatron-LM (1909.08053), section 3, figure 3.
    """
    asked = f"tensor.column_parallel(x, w, axis={axis!r})"
    _check_shapes(asked, x, w, bias, num_summed=1)
    check_divides(asked, axis, w.shape[1], "output features or heads")
    y = jnp.tensordot(x, shard_dim(w, axis, 1).astype(x.dtype), 1)
    y = shard_dim(y, axis, x.ndim - 1)
    return y if bias is None else y + _broadcastable(shard_dim(bias, axis, 0), y)


def row_parallel(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, *, axis: str = "tensor") -> jax.Array:
    """`x @ w + bias` with the first input dim sharded over an axis, as ``column_parallel`` returns it.

    One all-reduce of the result's size over the axis, or a reduce-scatter if ``scattered`` follows; the bias is added
    once, after it. No communication backward.

    Args:
        x: [..., *in]; the first dim of `in` is sharded.
        w: [*in, out].
        bias: [out], replicated.
        axis: mesh axis.

    Returns:
        [..., out].

    Raises:
        ShardingError: no mesh in context, no such axis, mismatched shapes, or indivisible features.

    References:
        Shoeybi et al., Megatron-LM (1909.08053), section 3, figure 3.
    """
    asked, num_summed = f"tensor.row_parallel(x, w, axis={axis!r})", w.ndim - 1
    _check_shapes(asked, x, w, bias, num_summed=num_summed)
    check_divides(asked, axis, w.shape[0], "input features or heads")
    x = shard_dim(x, axis, x.ndim - num_summed)
    y = jnp.tensordot(x, shard_dim(w, axis, 0).astype(x.dtype), num_summed)
    return y if bias is None else y + _broadcastable(bias, y)


def _check_shapes(asked: str, x: jax.Array, w: jax.Array, bias: jax.Array | None, *, num_summed: int) -> None:
    """Raises unless the last dims of `x` are the first dims of `w`, and the bias has the remaining dims of `w`."""
    shapes = f"x {x.shape}, w {w.shape}" + ("" if bias is None else f", bias {bias.shape}")
    if w.ndim < 2 or x.ndim < num_summed or x.shape[x.ndim - num_summed :] != w.shape[:num_summed]:
        raise ShardingError(asked, found=shapes, required="x of shape [..., *in], w of shape [*in, *out]")
    if bias is not None and bias.shape != w.shape[num_summed:]:
        raise ShardingError(asked, found=shapes, required=f"a bias of shape [*out] = {w.shape[num_summed:]}")


def _broadcastable(bias: jax.Array, y: jax.Array) -> jax.Array:
    """The bias with `y`'s dtype and leading dims of size 1."""
    return bias.astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
