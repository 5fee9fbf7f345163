"""The cache key of `sharding.jit`: what a compiled step depends on, and which part of it changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from .. import compat, rules
from ..annotations import axis_rules

LeafKey = tuple[tuple[int, ...], Any, bool, Any]
"""Of one leaf: shape, dtype, weak type, and its sharding if committed."""


class CacheKey(NamedTuple):
    """Two calls with equal keys run one executable."""

    mesh: Mesh | AbstractMesh
    tree: Any
    """The tree of the arguments that are not static."""
    statics: tuple[Any, ...]
    axis_rules: Any
    context: Any
    leaves: tuple[LeafKey, ...]


def cache_key(mesh: Mesh | AbstractMesh, tree: Any, statics: tuple[Any, ...], leaves: Sequence[Any]) -> CacheKey:
    """The key of a call. Raises TypeError for leaves that are neither arrays nor numbers."""
    keys = tuple([leaf_key(x) for x in leaves])
    return CacheKey(mesh, tree, statics, axis_rules.in_force(), context_key(), keys)


def changed_parts(key: CacheKey, last: CacheKey, names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The parts in which a key differs from an earlier one, as text.

    Args:
        key: of a call.
        last: of an earlier call.
        names: of the leaves of the call.
        arguments: names of the arguments of the call that are not static.
    """
    pairs = {
        "mesh": (key.mesh, last.mesh),
        "static arguments": (key.statics, last.statics),
        "axis rules": (key.axis_rules, last.axis_rules),
    }
    parts = [name for name, (new, old) in pairs.items() if new != old]
    parts += ["JAX's configuration"] if key.context != last.context and not parts else []
    if key.tree == last.tree:
        return parts + [f"{n}: {b} -> {a}" for n, a, b in zip(names, key.leaves, last.leaves, strict=True) if a != b]
    before = last.tree.children()
    trees = zip(arguments, key.tree.children(), before, strict=False)
    parts += [f"{n}: pytree" for n, new, old in trees if new != old]
    return parts + (["the number of arguments"] if len(arguments) != len(before) else [])


def context_key() -> Any:
    """The part of the cache key beside the arguments: JAX's configuration and the user's op rules."""
    return compat.trace_context(), rules.version()


def leaf_key(x: Any) -> LeafKey:
    """The part of the cache key that comes from one leaf. Raises TypeError for anything but an array or number."""
    if isinstance(x, jax.Array):
        sharding = x.sharding if compat.is_committed(x) else None
        return x.shape, x.dtype, getattr(x, "weak_type", False), sharding  # key arrays have no weak type
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, x.dtype, x.weak_type, x.sharding
    aval = jax.typeof(x)
    return aval.shape, aval.dtype, aval.weak_type, None
