"""Checks of the mesh axis and of shapes and dtypes, shared by the tensor-parallel layers."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..annotations.annotate import annotate
from ..errors import ShardingError
from ..mesh import current
from ..spec import sizes_text

U = P.UNCONSTRAINED


def axis_size(asked: str, axis: str) -> int:
    """The size of an axis of the mesh in context."""
    mesh = current()
    if mesh is None:
        raise ShardingError(asked, found="no mesh", required=f"a mesh with an axis {axis!r}", fix="sharding.mesh(...)")
    if axis not in mesh.shape:
        found, required = f"mesh axes {sizes_text(mesh.shape)}", f"a mesh axis {axis!r}"
        raise ShardingError(asked, found=found, required=required, fix=[f"axis={name!r}" for name in mesh.shape])
    return mesh.shape[axis]


def check_divides(asked: str, axes: str | tuple[str, ...], length: int, what: str) -> None:
    """Raises unless the axes divide a dim; `what` names its elements, such as `heads`."""
    names = (axes,) if isinstance(axes, str) else axes
    sizes = {name: axis_size(asked, name) for name in names}
    parts = math.prod(sizes.values())
    if length % parts:
        near = max(parts, round(length / parts) * parts)
        division = f"{length} = {length // parts} x {parts} + {length % parts}"
        raise ShardingError(
            asked,
            found=f"{length} {what} over {sizes_text(sizes)}: {division}",
            required=f"a multiple of {parts}",
            fix=[f"{near} {what}", f"an axis size that divides {length}"],
        )


def check_ndim(asked: str, name: str, x: Any, ndim: int, *, or_more: bool = False) -> None:
    """Raises unless an array has `ndim` dims."""
    if jnp.ndim(x) != ndim and not (or_more and jnp.ndim(x) > ndim):
        required = f"{'at least ' if or_more else ''}{ndim} dims"
        raise ShardingError(asked, found=f"{name} of shape {jnp.shape(x)}", required=required)


def check_dtype(asked: str, name: str, x: Any, kind: type, words: str) -> None:
    """Raises unless an array has a dtype of a kind, in words such as `integers`."""
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, kind):
        raise ShardingError(asked, found=f"{name} of dtype {dtype}", required=words)


def shard_dim(x: Any, axis: str, dim: int) -> Any:
    """An array annotated with one dim sharded over an axis and the others unconstrained."""
    entries: list[Any] = [U] * jnp.ndim(x)
    entries[dim] = axis
    return annotate(x, P(*entries))
