"""Specs of tensor-parallel parameters by role: column, row or vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec as P

from ..annotations.annotate import annotate
from ..annotations.layout import Rule, layout
from ..errors import ShardingError, raise_together
from .tensor_axis import U, axis_size

Role = Literal["column", "column_bias", "row", "vocabulary"]

LAST_DIMS: Mapping[str, tuple[bool, ...]] = {
    "column": (False, True),
    "column_bias": (True,),
    "row": (True, False),
    "vocabulary": (True, False),
}
"""Role -> which of the last dims are sharded, since stacked layers may lead. Biases of row-parallel layers are not."""

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
        ShardingError: no mesh in context, no such axis, unknown roles; as for `sharding.layout`, globs without a match
            of their own, arrays with too few dims, and indivisible ones.

    Example:
        >>> import jax, sharding
        >>> params = {"up": jax.ShapeDtypeStruct((8, 32), "float32"), "down": jax.ShapeDtypeStruct((32, 8), "float32")}
        >>> with sharding.mesh(devices=4, tensor=4):
        ...     specs(params, {"up": "column", "down": "row"})
        {'down': P('tensor', None), 'up': P(None, 'tensor')}
    """
    found = layout([*_rules(roles, axis), Rule("*", P(), optional=True)])(params)
    return jax.tree.map(lambda spec: spec if any(spec) else P(), found)


def split(params: Any, roles: Roles, *, axis: str = "tensor") -> Any:
    """Parameters annotated by role, for use inside a traced step; other dims stay unconstrained.

    Arguments and errors as in ``specs``.
    """

    specs = jax.tree.leaves(layout(_rules(roles, axis))(params), is_leaf=lambda x: x is None)
    leaves, tree = jax.tree.flatten(params)
    pairs = zip(leaves, specs, strict=True)
    return jax.tree.unflatten(tree, [x if spec is None else annotate(x, _open(spec)) for x, spec in pairs])


def _open(spec: P) -> P:
    """The spec with other dims unconstrained."""
    return P(*(U if entry is None else entry for entry in spec))


def _rules(roles: Roles, axis: str) -> list[Rule]:
    """The roles as rules of a layout."""
    asked = f"tensor.specs(params, roles, axis={axis!r})"
    axis_size(asked, axis)
    unknown = [
        ShardingError(f"{glob!r}: {role!r}", required=f"a role of {', '.join(LAST_DIMS)}, or a dim")
        for glob, role in roles.items()
        if isinstance(role, str) and role not in LAST_DIMS
    ]
    raise_together(asked, unknown)
    return [_rule(glob, role, axis) for glob, role in roles.items()]


def _rule(glob: str, role: Role | int, axis: str) -> Rule:
    if isinstance(role, str):
        return Rule(glob, P(*(axis if is_sharded else None for is_sharded in LAST_DIMS[role])), trailing=True)
    if role < 0:
        return Rule(glob, P(axis, *[None] * (-role - 1)), trailing=True)
    return Rule(glob, P(*[None] * role, axis))
