"""Dropout masks from the key and the place of an element: those of `jax.random.bernoulli`, in a kernel.

Element n of an array, counted in row-major order, has the bits of Threefry-2x32 at counter n (Salmon et al., Parallel
Random Numbers: As Easy as 1, 2, 3, SC 2011, section 4), so a shard needs to know where its rows and columns are, and no
mask is stored or sent. All arithmetic is of int32, which wraps around.

Shape suffixes: F columns.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
SIGN = -(2**31)
RANDOM_BITS = 23
"""Of a number that is compared with the rate, as in `jax.random.uniform` of float32."""

FLOPS = 110
"""Integer operations per element."""


class Place(NamedTuple):
    """Where the elements of an array are, and the key."""

    starts: tuple[jax.Array, ...]
    """int32 of the array's leading dims: the low word, and high word if any is not 0, of each row's first counter."""
    columns_F: jax.Array
    """int32: the numbers of the columns."""
    words: tuple[jax.Array, jax.Array]
    """int32 [1] each: the key."""


def place(shape: tuple[int, ...], key: jax.Array) -> Place:
    """The place of each element of a whole array."""
    lead, columns = shape[:-1], shape[-1]
    row = jnp.zeros(lead, jnp.uint32)
    for dim, size in enumerate(lead):
        stride = math.prod(lead[dim + 1 :])
        row += jax.lax.broadcasted_iota(jnp.uint32, lead, dim) * jnp.uint32(stride) if size > 1 else jnp.uint32(0)
    starts = [row * jnp.uint32(columns)]
    if math.prod(shape) > 2**32:
        starts.append(_high_word(row, columns))
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    signed = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    return Place(tuple(map(signed, starts)), jnp.arange(columns), (signed(words[:1]), signed(words[1:])))


def obstacle(x: Any, key: Any) -> str:
    """Why a kernel can't draw the mask, or an empty text."""
    if not getattr(jax.config, "jax_threefry_partitionable"):  # noqa: B009 unknown to the type checker
        return "jax_threefry_partitionable=True"
    if str(jax.random.key_impl(key)) != "threefry2x32" or key.ndim != (not is_typed(key)):
        return "one key of threefry2x32"
    return "" if math.prod(x.shape[:-1]) <= 2**31 else "at most 2**31 rows"


def is_typed(key: Any) -> bool:
    """Whether a key is of `jax.random.key`, not of `jax.random.PRNGKey`."""
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def is_kept(place: Place, rate: float) -> jax.Array:
    """Booleans, in a kernel or in plain JAX, of what broadcasts: rows' starts, columns, and words."""
    low = place.starts[0] + place.columns_F
    if len(place.starts) > 1:
        high = place.starts[1] + ((low ^ SIGN) < (place.starts[0] ^ SIGN)).astype(jnp.int32)
    else:
        high = jnp.zeros_like(low)
    bits = functools.reduce(jnp.bitwise_xor, _threefry(place.words, (high, low)))
    threshold = math.ceil(float(np.float32(1 - rate)) * 2**RANDOM_BITS)
    return jax.lax.shift_right_logical(bits, jnp.full_like(bits, 32 - RANDOM_BITS)) < threshold


def _threefry(words: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    schedule = (*words, words[0] ^ words[1] ^ PARITY)
    x, y = counter[0] + words[0], counter[1] + words[1]
    for i in range(5):
        for bits in ROTATIONS[i % 2]:
            x = x + y
            right = jax.lax.shift_right_logical(y, jnp.full_like(y, 32 - bits))
            y = x ^ (jax.lax.shift_left(y, jnp.full_like(y, bits)) | right)
        x, y = x + schedule[(i + 1) % 3], y + schedule[(i + 2) % 3] + (i + 1)
    return x, y


def _high_word(row: jax.Array, columns: int) -> jax.Array:
    """The high 32 bits of row times columns, by products of 16 bits."""
    low, high, low_, high_ = row & 0xFFFF, row >> 16, jnp.uint32(columns & 0xFFFF), jnp.uint32(columns >> 16)
    middle = high * low_ + (low * low_ >> 16)
    return high * high_ + (middle >> 16) + ((middle & 0xFFFF) + low * high_ >> 16)
