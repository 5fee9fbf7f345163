"""The axis of the mesh that splits, and what it has to divide."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..annotation import annotate
from ..errors import ShardingError
from ..mesh import current
from ..spec import sizes_text

U = P.UNCONSTRAINED


def size_of(asked: str, axis: str) -> int:
    """The size of an axis of the mesh in force."""
    mesh = current()
    if mesh is None:
        raise ShardingError(asked, there="no mesh", must="a mesh with this axis is in force", fix="sharding.mesh(...)")
    if axis not in mesh.shape:
        there, must = f"the mesh {sizes_text(mesh.shape)}", f"the mesh has an axis {axis!r}"
        raise ShardingError(asked, there=there, must=must, fix=[f"axis={name!r}" for name in mesh.shape])
    return mesh.shape[axis]


def check_divides(asked: str, axes: str | tuple[str, ...], length: int, what: str) -> None:
    """Raises where axes do not divide a dim; `what` it is, such as `heads`."""
    names = (axes,) if isinstance(axes, str) else axes
    sizes = {name: size_of(asked, name) for name in names}
    parts = math.prod(sizes.values())
    if length % parts:
        near = max(parts, round(length / parts) * parts)
        rest = f"{length} = {length // parts} x {parts} + {length % parts}"
        raise ShardingError(
            asked,
            there=f"{length} {what} over {sizes_text(sizes)}: {rest}",
            must=f"each device gets as many {what}",
            fix=[f"{near} {what}", f"a size that divides {length}"],
        )


def check_ndim(asked: str, name: str, x: Any, least: int, most: int | None = None) -> None:
    """Raises where an array has another number of dims than one that is possible."""
    ndim = jnp.ndim(x)
    if ndim < least or (most is not None and ndim > most):
        number = f"{least}" if most == least else f"at least {least}" if most is None else f"{least} to {most}"
        raise ShardingError(asked, there=f"{name} of shape {jnp.shape(x)}", must=f"{name} has {number} dims")


def check_dtype(asked: str, name: str, x: Any, kind: type, words: str) -> None:
    """Raises where the elements of an array are of another kind."""
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, kind):
        raise ShardingError(asked, there=f"{name} of {dtype}", must=f"{name} are {words}")


def split_dim(x: Any, axis: str, dim: int) -> Any:
    """An array with one dim split by an axis, and the others left to the pass."""
    entries: list[Any] = [U] * jnp.ndim(x)
    entries[dim] = axis
    return annotate(x, P(*entries))
