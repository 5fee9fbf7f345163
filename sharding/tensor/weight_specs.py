"""Specs of tensor-parallel parameters by role: column, row or vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .. import paths
from ..annotations.annotate import annotate
from ..errors import ShardingError, raise_together
from .tensor_axis import U, axis_size, check_divides

Role = Literal["column", "column_bias", "row", "vocabulary"]

DIMS: Mapping[str, int] = {"column": -1, "column_bias": -1, "row": -2, "vocabulary": -2}
"""Role -> the sharded dim, negative so that stacked layers may lead. Biases of row-parallel layers are replicated."""

Roles = Mapping[str, "Role | int"]
"""Pattern over parameter paths, as in `sharding.layout` -> their role, or the dim to shard, such as that of heads."""


def specs(params: Any, roles: Roles, *, axis: str = "tensor") -> Any:
    """Tensor-parallel specs of a model's parameters, a pytree like `params`, for placing them.

    The matrix of a branch's first layer is `column`, its bias `column_bias`, the matrix of the second layer `row`;
    embedding and logit tables are `vocabulary`. All others, such as biases of second layers and norms, are replicated.

    Args:
        params: a pytree of arrays or ShapeDtypeStructs.
        roles: the first matching glob wins.
        axis: mesh axis.

    Raises:
        ShardingError: no mesh in context, no such axis; globs without a match of their own, unknown roles, or
            indivisible dims, reported together.

    Example:
        >>> import jax, sharding
        >>> params = {"up": jax.ShapeDtypeStruct((8, 32), "float32"), "down": jax.ShapeDtypeStruct((32, 8), "float32")}
        >>> with sharding.mesh(devices=4, tensor=4):
        ...     specs(params, {"up": "column", "down": "row"})
        {'down': P('tensor', None), 'up': P(None, 'tensor')}
    """
    return _map_by_role(params, roles, axis, lambda leaf, dim: P() if dim is None else _spec(leaf, dim, axis, None))


def split(params: Any, roles: Roles, *, axis: str = "tensor") -> Any:
    """Parameters annotated by role, for use inside a traced step; other dims stay unconstrained.

    Arguments and errors as in ``specs``.
    """

    def annotated(leaf: Any, dim: int | None) -> Any:
        return leaf if dim is None else annotate(leaf, _spec(leaf, dim, axis, U))

    return _map_by_role(params, roles, axis, annotated)


def _spec(leaf: Any, dim: int, axis: str, others: Any) -> P:
    entries = [others] * jnp.ndim(leaf)
    entries[dim] = axis
    return P(*entries)


def _map_by_role(params: Any, roles: Roles, axis: str, function: Any) -> Any:
    """`function(leaf, dim)` of every parameter and its sharded dim, or None."""
    asked = f"tensor.specs(params, roles, axis={axis!r})"
    axis_size(asked, axis)
    named = [(paths.text(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    raise_together(asked, [*_unknown(roles), *_unused(named, roles)])
    dims, failures = [], []
    for path, leaf in named:
        role = next((role for glob, role in roles.items() if paths.Glob(glob).matches(path)), None)
        dim = DIMS[role] if isinstance(role, str) else role
        dims.append(dim)
        if dim is not None:
            try:
                _check_fits(path, leaf, dim, axis)
            except ShardingError as failure:
                failures.append(failure)
    raise_together(asked, failures)
    mapped = [function(leaf, dim) for (_, leaf), dim in zip(named, dims, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), mapped)


def _unknown(roles: Roles) -> list[ShardingError]:
    return [
        ShardingError(f"{glob!r}: {role!r}", required=f"a role of {', '.join(DIMS)}, or a dim")
        for glob, role in roles.items()
        if isinstance(role, str) and role not in DIMS
    ]


def _unused(named: list[tuple[str, Any]], roles: Roles) -> list[ShardingError]:
    names = [path for path, _ in named]
    found = (paths.unmatched(f"{glob!r}: {role!r}", glob, names) for glob, role in roles.items())
    return [*(error for error in found if error is not None), *_shadowed(names, roles)]


def _shadowed(names: list[str], roles: Roles) -> list[ShardingError]:
    """The globs all of whose parameters an earlier glob matches, which wins."""
    failures = []
    for k, (glob, role) in enumerate(roles.items()):
        matched = [path for path in names if paths.Glob(glob).matches(path)]
        before = [one for one in [*roles][:k] if any(paths.Glob(one).matches(path) for path in matched)]
        if matched and all(any(paths.Glob(one).matches(path) for one in before) for path in matched):
            failures.append(
                ShardingError(
                    f"{glob!r}: {role!r}",
                    found=f"all of its parameters match {' or '.join(map(repr, before))} first",
                    required="a parameter for every glob; the first match wins",
                    fix=f"{glob!r} in front of {before[0]!r}",
                )
            )
    return failures


def _check_fits(path: str, leaf: Any, dim: int, axis: str) -> None:
    shape = jnp.shape(leaf)
    if not -len(shape) <= dim < len(shape):
        raise ShardingError(path, found=f"shape {shape}", required=f"a dim {dim}, which its role shards")
    check_divides(f"{path}, dim {dim} of {shape}", axis, shape[dim], "features, heads or rows")
