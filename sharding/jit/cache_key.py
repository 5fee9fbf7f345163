"""The cache key of `sharding.jit`: what a compiled step depends on, and which part of it changed."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from .. import compat, rules
from ..annotations import axis_rules
from .arguments import Arguments
from .signature import Label

LeafKey = tuple[tuple[int, ...], Any, bool, Any]
"""Of one leaf: shape, dtype, weak type, and its sharding if committed."""


class CacheKey(NamedTuple):
    """Two calls with equal keys run one executable."""

    mesh: Mesh | AbstractMesh
    tree: Any
    """The tree of the arguments that are not static."""
    labels: tuple[Label, ...]
    """Of those arguments."""
    statics: tuple[Any, ...]
    ties: tuple[tuple[int, int], ...]
    """The leaves that are one nnx Variable."""
    context: Any
    leaves: tuple[LeafKey, ...]


def cache_key(mesh: Mesh | AbstractMesh, arguments: Arguments) -> CacheKey:
    """The key of a call. Raises TypeError for leaves that are neither arrays nor numbers."""
    keys = tuple([leaf_key(x) for x in arguments.leaves])
    return CacheKey(
        mesh, arguments.tree, arguments.labels, arguments.statics, (*arguments.ties.items(),), context_key(), keys
    )


def changed_parts(key: CacheKey, last: CacheKey, arguments: Arguments) -> list[str]:
    """The parts in which the key of a call with these arguments differs from an earlier one, as text."""
    names = arguments.leaf_names
    pairs = {
        "mesh": (key.mesh, last.mesh),
        "static arguments": (key.statics, last.statics),
        "shared variables": (key.ties, last.ties),
        "axis rules": (key.context[-1], last.context[-1]),
    }
    parts = [name for name, (new, old) in pairs.items() if new != old]
    parts += ["JAX's configuration"] if key.context != last.context and not parts else []
    if key.tree == last.tree:
        return parts + [f"{n}: {b} -> {a}" for n, a, b in zip(names, key.leaves, last.leaves, strict=True) if a != b]
    before = last.tree.children()
    trees = zip(arguments.names, key.tree.children(), before, strict=False)
    parts += [f"{n}: pytree" for n, new, old in trees if new != old]
    return parts + (["the number of arguments"] if key.labels != last.labels else [])


def context_key() -> Any:
    """The part of the cache key beside the arguments: JAX's configuration, the user's op rules and axis rules."""
    return compat.trace_context(), rules.version(), axis_rules.in_force()


def leaf_key(x: Any) -> LeafKey:
    """The part of the cache key that comes from one leaf. Raises TypeError for anything but an array or number."""
    if isinstance(x, jax.Array):
        sharding = x.sharding if compat.is_committed(x) else explicit_sharding(x)
        return x.shape, x.dtype, getattr(x, "weak_type", False), sharding  # key arrays have no weak type
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, x.dtype, x.weak_type, x.sharding
    aval = jax.typeof(x)
    return aval.shape, aval.dtype, aval.weak_type, None


def explicit_sharding(x: Any) -> Any:
    """The sharding in the type of a tracer under a mesh with Explicit axes; None for anything else."""
    if not isinstance(x, compat.Tracer):
        return None
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or not sharding.mesh.explicit_axes or not any(sharding.spec):
        return None
    return sharding
