"""Reshapes of a line of elements to a matrix, and back, which XLA:TPU's tiles make kernels of their own."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries

from sharding.memory.tile_reshapes import moves_elements

N = 2**13
LINE, MATRIX = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((N * N,), (N, N)))
WIDE = jax.ShapeDtypeStruct((64, N, 128), jnp.float32)
SIZE = 4 * N * N


def f(x):
    return jnp.square(x) + 1


def joined(x, y):
    return jnp.concatenate([x.reshape(-1), y.reshape(-1)])


def raveled_norm(x, y):
    return jnp.square(joined(x, y)).sum()


PROGRAMS = {
    "of an argument": (lambda x: 2 * x.reshape(N, N), (LINE,), 1),
    "of what is computed, and read elementwise": (lambda x: 2 * f(x).reshape(N, N), (LINE,), 1),
    "back": (lambda x: 2 * x.reshape(-1), (MATRIX,), 1),
    "of a product": (lambda x, w: (x @ w).reshape(-1), (MATRIX, MATRIX), 1),
    "for a product, which reads half the bytes": (lambda x, w: x.reshape(N, N) @ w, (LINE, MATRIX), 0.5),
    "for a concatenation": (lambda x, y: 2 * joined(x, y), (MATRIX, MATRIX), 2),
    "for the norm of several": (raveled_norm, (MATRIX, MATRIX), 2),
    "for the sum of all": (lambda x: jnp.square(x.reshape(-1)).sum(), (MATRIX,), 0),
    "for sums of rows": (lambda x: f(x).reshape(N, N).sum(1), (LINE,), 2),
    "to as many lanes as a tile has": (lambda x: 2 * f(x).reshape(64, N, 128), (LINE,), 0),
    "from those": (lambda x: 2 * f(x).reshape(-1), (WIDE,), 0),
}
"""A program, its arguments, and how many arrays as large as a matrix are stored besides them and the results."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_reshape_from_or_to_a_line_is_stored(name):
    check_temporaries(PROGRAMS[name], SIZE)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_stores_it(name):
    check_compiled_temporaries(PROGRAMS[name], SIZE)


@pytest.mark.parametrize(
    "source, shape, moves",
    [
        ((1024,), (8, 128), False),
        ((1024,), (4, 256), True),
        ((4, 256), (1, 1024), True),
        ((1, 1024), (1024, 1), False),
        ((1024,), (2, 4, 128), False),
        ((4, 256), (8, 128), False),
        ((1,), (1, 1), False),
    ],
)
def test_which_reshapes_move_elements(source, shape, moves):
    assert moves_elements(source, shape) == moves_elements(shape, source) == moves
