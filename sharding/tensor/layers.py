"""The two layers of a branch: the first is split by its output features, the second by its input features.

Between them each device has its part of the features and nothing is sent. In the backward the two change places.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..errors import ShardingError
from .axis import check_divides, split_dim


def column_parallel(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, *, axis: str = "tensor") -> jax.Array:
    """`x @ w + bias` where an axis splits the first output dim: features, or the heads of attention.

    No communication; one sum of `x`'s size over the axis in the backward.

    Args:
        x: [..., in], whole over the axis; see ``gathered`` where its length is split.
        w: [in, *out]; the first of `out` is split.
        bias: [*out], split as `w` is.
        axis: of the mesh.

    Returns:
        [..., *out].

    Raises:
        ShardingError: no mesh in force, no such axis; shapes that don't fit, features that it does not divide.

    References:
        Shoeybi et al., Megatron-LM (1909.08053), section 3, figure 3.
    """
    asked = f"tensor.column_parallel(x, w, axis={axis!r})"
    _check_shapes(asked, x, w, bias, num_summed=1)
    check_divides(asked, axis, w.shape[1], "output features or heads")
    y = jnp.tensordot(x, split_dim(w, axis, 1).astype(x.dtype), 1)
    y = split_dim(y, axis, x.ndim - 1)
    return y if bias is None else y + _like(split_dim(bias, axis, 0), y)


def row_parallel(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, *, axis: str = "tensor") -> jax.Array:
    """`x @ w + bias` where an axis splits the first input dim, as ``column_parallel`` leaves it.

    One sum of the result's size over the axis, to which the bias is added once; no communication in the backward. Where
    ``scattered`` follows, the sum is a reduce-scatter.

    Args:
        x: [..., *in]; the first of `in` is split.
        w: [*in, out].
        bias: [out], whole on each device.
        axis: of the mesh.

    Returns:
        [..., out].

    Raises:
        ShardingError: no mesh in force, no such axis; shapes that don't fit, features that it does not divide.

    References:
        Shoeybi et al., Megatron-LM (1909.08053), section 3, figure 3.
    """
    asked, num_summed = f"tensor.row_parallel(x, w, axis={axis!r})", w.ndim - 1
    _check_shapes(asked, x, w, bias, num_summed=num_summed)
    check_divides(asked, axis, w.shape[0], "input features or heads")
    x = split_dim(x, axis, x.ndim - num_summed)
    y = jnp.tensordot(x, split_dim(w, axis, 0).astype(x.dtype), num_summed)
    return y if bias is None else y + _like(bias, y)


def _check_shapes(asked: str, x: jax.Array, w: jax.Array, bias: jax.Array | None, *, num_summed: int) -> None:
    """Raises where the last dims of `x` are not the first of `w`, or the bias is not like its others."""
    shapes = f"x {x.shape}, w {w.shape}" + ("" if bias is None else f", bias {bias.shape}")
    if w.ndim < 2 or x.ndim < num_summed or x.shape[x.ndim - num_summed :] != w.shape[:num_summed]:
        raise ShardingError(asked, there=shapes, must="x is [..., *in] and w is [*in, *out]")
    if bias is not None and bias.shape != w.shape[num_summed:]:
        raise ShardingError(asked, there=shapes, must=f"bias is [*out], {w.shape[num_summed:]}")


def _like(bias: jax.Array, y: jax.Array) -> jax.Array:
    """A bias for each position."""
    return bias.astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
