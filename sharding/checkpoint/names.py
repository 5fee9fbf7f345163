"""A state as arrays by name, as a checkpoint stores it."""

from typing import Any

import jax

from .. import paths

Tree = Any
"""A pytree of arrays, or of ShapeDtypeStructs that stand for arrays."""


def named_leaves(tree: Tree) -> dict[str, Any]:
    """The leaves of `tree` by the name of their path: its keys joined by slashes, nnx's closing `value` dropped."""
    return {paths.text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def is_key(leaf: Any) -> bool:
    """Whether an array, or what stands for one, holds random keys."""
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def stored(leaf: jax.Array) -> jax.Array:
    """The array as it is written: random keys as their bits."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def stored_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """What is written of an array like `leaf`, with its sharding: random keys have a dim of bits behind their own."""
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    shape = jax.eval_shape(jax.random.key_data, shape) if is_key(leaf) else shape
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=leaf.sharding)
