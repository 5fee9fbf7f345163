"""A checksum of an array that its mesh does not change."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """The checksum of every array, computed where the array lies."""
    # One after the other: XLA:CPU of JAX 0.10.2 may hang when several programs that communicate are in flight at once
    # on fewer cores than devices. Delete the waiting when that release is no longer supported.
    jax.block_until_ready(arrays)
    return {name: int(jax.block_until_ready(_checksum(array))) for name, array in arrays.items()}


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """The sum modulo 2^32 of every element's bits times an odd number that its position gives.

    A sum does not depend on the order, hence not on the mesh. An odd factor turns every change of one element into a
    change of the sum.
    """
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for dim, length in enumerate(bits.shape):
        position = position * jnp.uint32(length) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    factor = position * jnp.uint32(2654435761) ^ (position >> 15)
    return jnp.sum(bits * (factor | 1), dtype=jnp.uint32)
