"""The arrays of a state by name, as stored in a checkpoint."""

from typing import Any

import jax
import jax.numpy as jnp

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
    """The array as stored: random keys as their bits, and elements of a dtype that has no files as bytes."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    if not _is_bytes(leaf.dtype):
        return leaf
    return leaf.astype(jnp.uint8) if _is_integer(leaf.dtype) else jax.lax.bitcast_convert_type(leaf, jnp.uint8)


def as_saved(array: jax.Array, leaf: Any, impl: str | None) -> jax.Array:
    """The array or random keys that are stored as `array`.

    Args:
        array: as stored.
        leaf: array or ShapeDtypeStruct with the dtype and sharding of the result.
        impl: of random keys.
    """
    if is_key(leaf):
        return jax.device_put(jax.random.wrap_key_data(array, impl=impl), leaf.sharding)
    if not _is_bytes(leaf.dtype):
        return array
    return array.astype(leaf.dtype) if _is_integer(leaf.dtype) else jax.lax.bitcast_convert_type(array, leaf.dtype)


def stored_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """The abstract stored array for `leaf`, with its sharding: random keys have a trailing dim of bits."""
    shape = jax.eval_shape(stored, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=leaf.sharding)


def _is_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer)


def _is_bytes(dtype: Any) -> bool:
    """Whether TensorStore, which writes the files, lacks a dtype, such as uint4."""
    import tensorstore

    try:
        tensorstore.dtype(str(dtype))
    except (TypeError, ValueError):
        return True
    return False
