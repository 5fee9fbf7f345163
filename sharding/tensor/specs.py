"""Which dim of each parameter an axis splits, by what the parameter does."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .. import paths
from ..annotation import annotate
from ..errors import ShardingError, raise_together
from .axis import U, check_divides, size_of

Role = Literal["column", "column_bias", "row", "vocabulary"]

DIMS: Mapping[str, int] = {"column": -1, "column_bias": -1, "row": -2, "vocabulary": -2}
"""Role -> the dim that is split, so that stacked layers may lead. What a row-parallel layer adds is whole."""

Roles = Mapping[str, "Role | int"]
"""Glob over parameters' paths -> what they do, or the dim to split, such as that of attention's heads."""


def specs(params: Any, roles: Roles, *, axis: str = "tensor") -> Any:
    """The specs of a model's parameters, to place them by: a pytree like `params`.

    A first layer's matrix is `column` and its bias `column_bias`, the second's matrix is `row`; the tables of an
    embedding and of logits are `vocabulary`. All others, the biases of second layers and of norms too, are whole.

    Args:
        params: a pytree of arrays or of their shapes.
        roles: the first glob that a path matches counts.
        axis: of the mesh.

    Raises:
        ShardingError: no mesh in force, no such axis; a glob that matches nothing, no such role, a dim that the axis
            does not divide. All together.

    Example:
        >>> import jax, sharding
        >>> params = {"up": jax.ShapeDtypeStruct((8, 32), "float32"), "down": jax.ShapeDtypeStruct((32, 8), "float32")}
        >>> with sharding.mesh(devices=4, tensor=4):
        ...     specs(params, {"up": "column", "down": "row"})
        {'down': P('tensor', None), 'up': P(None, 'tensor')}
    """
    return _mapped(params, roles, axis, lambda leaf, dim: P() if dim is None else _spec(leaf, dim, axis, None))


def split(params: Any, roles: Roles, *, axis: str = "tensor") -> Any:
    """Parameters with these roles, annotated, for use inside a traced step; other dims are left to the pass.

    Arguments and errors as in ``specs``.
    """

    def annotated(leaf: Any, dim: int | None) -> Any:
        return leaf if dim is None else annotate(leaf, _spec(leaf, dim, axis, U))

    return _mapped(params, roles, axis, annotated)


def _spec(leaf: Any, dim: int, axis: str, others: Any) -> P:
    entries = [others] * jnp.ndim(leaf)
    entries[dim] = axis
    return P(*entries)


def _mapped(params: Any, roles: Roles, axis: str, change: Any) -> Any:
    """`change` of every parameter and the dim that is to be split, or None."""
    asked = f"tensor.specs(params, roles, axis={axis!r})"
    size_of(asked, axis)
    named = [(paths.text(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    raise_together(asked, [*_unknown(roles), *_unused(named, roles)])
    dims, failures = [], []
    for path, leaf in named:
        role = next((role for glob, role in roles.items() if fnmatch.fnmatchcase(path, glob)), None)
        dim = DIMS[role] if isinstance(role, str) else role
        dims.append(dim)
        if dim is not None:
            try:
                _check_fits(path, leaf, dim, axis)
            except ShardingError as failure:
                failures.append(failure)
    raise_together(asked, failures)
    found = [change(leaf, dim) for (_, leaf), dim in zip(named, dims, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def _unknown(roles: Roles) -> list[ShardingError]:
    return [
        ShardingError(f"{glob!r}: {role!r}", must=f"a role is one of {', '.join(DIMS)}, or the dim to split")
        for glob, role in roles.items()
        if isinstance(role, str) and role not in DIMS
    ]


def _unused(named: list[tuple[str, Any]], roles: Roles) -> list[ShardingError]:
    names = [path for path, _ in named]
    return [
        ShardingError(
            f"{glob!r}: {role!r}",
            there=f"no path that it matches among {len(names)}",
            must="every glob matches a parameter",
            fix=difflib.get_close_matches(glob, names, n=3, cutoff=0),
        )
        for glob, role in roles.items()
        if not any(fnmatch.fnmatchcase(path, glob) for path in names)
    ]


def _check_fits(path: str, leaf: Any, dim: int, axis: str) -> None:
    shape = jnp.shape(leaf)
    if not -len(shape) <= dim < len(shape):
        raise ShardingError(path, there=f"shape {shape}", must=f"it has a dim {dim}, which its role splits")
    check_divides(f"{path}, dim {dim} of {shape}", axis, shape[dim], "features, heads or rows")
