"""What XLA:TPU stores since kernels read or write parts of it: paddings, concatenations, slices, updates."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries

ROWS, SIZE = 1024, 256
X, Y = (jax.ShapeDtypeStruct((ROWS, SIZE, SIZE), jnp.float32) for _ in range(2))
HALF = jax.ShapeDtypeStruct((ROWS, SIZE, SIZE // 2), jnp.float32)
UPDATE = jax.ShapeDtypeStruct((ROWS // 2, SIZE, SIZE), jnp.float32)
INDEX = jax.ShapeDtypeStruct((), jnp.int32)
WHOLE = 4 * ROWS * SIZE * SIZE
"""Bytes of X, too many for the memory on the chip."""


def joined(x, y, axis=2):
    return jnp.concatenate([x, y], axis)


def rotary(x, c, s):
    a, b = jnp.split(x, 2, -1)
    return 2 * joined(a * c - b * s, b * c + a * s)


def halves(x):
    return x[..., : SIZE // 2], x[..., SIZE // 2 :]


def gated(x):
    value, gate = halves(jnp.square(x) + 1)
    return value * jax.nn.sigmoid(gate)


def summed_halves(x):
    first, second = halves(jnp.square(x) + 1)
    return jnp.exp(first).sum(0), jnp.tanh(second).sum(1)


PROGRAMS = {
    "a concatenation of arguments": (lambda x, y: 2 * joined(x, y), (X, Y), 0),
    "of one computed": (lambda x, y: 2 * joined(3 * x, y), (X, Y), 1),
    "of two": (lambda x, y: 2 * joined(x + 1, 3 * y), (X, Y), 2),
    "of rows": (lambda x, y: 2 * joined(x + 1, 3 * y, 0), (X, Y), 2),
    "reduced": (lambda x, y: joined(x + 1, 3 * y).sum(0), (X, Y), 2),
    "of what another op reads too": (lambda x, y: (lambda z: (2 * joined(z, y), z.sum(0)))(x + 1), (X, Y), 1),
    "with zeros": (lambda x: 2 * joined(x, jnp.zeros(X.shape)), (X,), 0),
    "of another shape": (lambda x, y: 2 * joined((x + 1).reshape(512, 512, 256), y.reshape(512, 512, 256)), (X, Y), 1),
    "stacked": (lambda x, y: 2 * jnp.stack([x + 1, 3 * y]), (X, Y), 2),
    "padded": (lambda x: 2 * jnp.pad(x + 1, ((0, 0), (0, 0), (128, 0))), (X,), 1),
    "an argument padded": (lambda x: 2 * jnp.pad(x, ((0, 0), (0, 0), (128, 0))), (X,), 0),
    "rotary": (rotary, (X, HALF, HALF), 1),
    "rolled": (lambda x: 2 * jnp.roll(jnp.sin(x), 512, 0), (X,), 2),
    "rolled by a row, the others where they are": (lambda x: jnp.roll(jnp.sin(x), 1, 1), (X,), 1),
    "gated": (gated, (X,), 1),
    "halves for two kernels": (summed_halves, (X,), 1),
    "halves of an argument": (lambda x: (lambda a, b: a * jnp.exp(b))(*halves(x)), (X,), 0),
    "one slice": (lambda x: 2 * halves(jnp.square(x) + 1)[1], (X,), 0),
    "every second row": (lambda x: 2 * (jnp.square(x) + 1)[::2], (X,), 1),
    "reversed": (lambda x: 2 * jnp.flip(x + 1, 2), (X,), 1),
    "rows reversed": (lambda x: 2 * jnp.flip(x + 1, 0), (X,), 0),
    "updated": (lambda x, u, i: lax.dynamic_update_slice(x + 1, 3 * u, (i, 0, 0)).sum(1), (X, UPDATE, INDEX), 1),
    "an argument updated": (lambda x, u, i: 2 * lax.dynamic_update_slice(x, u, (i, 0, 0)), (X, UPDATE, INDEX), 1),
    "an index of the largest": (lambda x: jnp.argmax(jnp.square(x) + 1, -1), (X,), 0),
}
"""A program, its arguments, and how many arrays as large as X are stored besides them and the results."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_arrays_of_which_kernels_read_parts_are_stored(name):
    check_temporaries(PROGRAMS[name], WHOLE)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_stores_them(name):
    check_compiled_temporaries(PROGRAMS[name], WHOLE)
