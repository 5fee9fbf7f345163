"""Transposed results and weights of loops on GPUs: what computes or reads them does so in their order of dims."""

import jax.numpy as jnp
import pytest
from jax import lax
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries, floats

ROWS, WEIGHTS, SUMMANDS = floats(8192, 1024), floats(1024, 4096), floats(8192, 4096)
TOKENS, MATRIX, STACK = floats(256, 256, 512), floats(512, 512), floats(256, 512, 256)
LAYERS, COLUMNS, BATCH = floats(512, 64, 512), floats(512, 512, 64), floats(16384, 512)
UNIT = 4 * 8192 * 4096
"""Bytes of a result."""


def states(w, x):
    return lax.scan(lambda h, row: (jnp.tanh(h @ w + row),) * 2, x[0], x)[1]


def last(w, x):
    return lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x)


def chain(ws, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


def moved(f, *order):
    return lambda *args: f(*args).transpose(order)


def tanh_of_product(x, w):
    return jnp.tanh(x @ w)


PROGRAMS = {
    "product": (moved(tanh_of_product, 1, 0), (ROWS, WEIGHTS), 0),
    "product and an argument": (moved(lambda x, w, y: x @ w + y, 1, 0), (ROWS, WEIGHTS, SUMMANDS), 0),
    "product, also summed": (lambda x, w: (jnp.tanh(x @ w).T, jnp.tanh(x @ w).sum(0)), (ROWS, WEIGHTS), 0),
    "product, columns first": (moved(tanh_of_product, 2, 0, 1), (TOKENS, MATRIX), 0),
    "product, columns between rows": (moved(tanh_of_product, 0, 2, 1), (TOKENS, MATRIX), 1),
    "products, columns first": (moved(tanh_of_product, 0, 2, 1), (TOKENS, STACK), 0),
    "stack": (moved(states, 1, 0, 2), (MATRIX, TOKENS), 0),
    "sine of a stack": (moved(lambda w, x: jnp.sin(states(w, x)), 1, 0, 2), (MATRIX, TOKENS), 0),
    "stack, last dim first": (moved(states, 2, 0, 1), (MATRIX, TOKENS), 1),
    "carry": (moved(last, 1, 0, 2), (MATRIX, TOKENS), 1),
    "weights of a loop": (lambda ws, x: chain(ws.transpose(1, 0, 2), x), (LAYERS, BATCH), 0.25),
    "weights of a loop, iterations last": (lambda ws, x: chain(ws.transpose(2, 0, 1), x), (COLUMNS, BATCH), 0.25),
}
"""A program, its arguments, and how many arrays of 128 MiB it stores."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_kernel_transposes_them(name):
    check_temporaries(PROGRAMS[name], UNIT, "gpu", parts=30)


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize("name", PROGRAMS)
def test_nor_does_the_compiler_for_gpus(name):
    check_compiled_temporaries(PROGRAMS[name], UNIT, "h100:1x8", parts=30)


def test_rows_of_an_argument_that_a_loop_adds_are_transposed_before():
    def summed(x, first):
        return lax.scan(lambda h, row: (jnp.tanh(h + row), None), first, x.transpose(1, 0, 2))[0]

    check_temporaries((summed, (TOKENS, floats(256, 512)), 1), UNIT, "gpu")
