"""The arrays of a state by name, as stored in a checkpoint."""

from typing import Any

import jax

from .. import paths

Tree = Any
"""A pytree of arrays or ShapeDtypeStructs."""


def named_leaves(tree: Tree) -> dict[str, Any]:
    """The leaves of `tree` by path: keys joined by slashes, the trailing `value` of nnx variables dropped."""
    return {paths.text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def is_key(leaf: Any) -> bool:
    """Whether an array or ShapeDtypeStruct holds random keys."""
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def stored(leaf: jax.Array) -> jax.Array:
    """The array as stored: random keys as their bits."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def stored_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """The abstract stored array for `leaf`, with its sharding: random keys have a trailing dim of bits."""
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    shape = jax.eval_shape(jax.random.key_data, shape) if is_key(leaf) else shape
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=leaf.sharding)
