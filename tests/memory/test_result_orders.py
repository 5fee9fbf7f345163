"""Results that XLA:TPU computes in another order of dims, and copies: those of transposed products and loops."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries, floats

WIDE, MATRICES = floats(8192, 4096), floats(128, 512, 512)
NARROW = floats(32, 1024, 8, 64)
WEIGHTS, LONG_ROWS = floats(512, 256, 512), floats(512, 192, 1024)
ROWS, WEIGHT = floats(256, 256, 512), floats(512, 512)
UNIT = 4 * 256 * 256 * 512
"""Also of the other arrays."""


def swapped(x):
    return x.transpose(1, 0, 2)


def stacked(w, x):
    return jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row),) * 2, x[0], x)[1]


def last(w, x):
    return jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), x[0], x)[0]


def layer(h, w):
    return jnp.tanh(h @ w), None


def attention(q, k):
    """Results with few elements in their last dim are stored in another order, which products write."""
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.einsum("bqhd,bkhd->bhqk", q, k), k)


FROM_ARGUMENTS = {
    "a transpose": (lambda x: x.T, (WIDE,), 0),
    "a transposed sine": (lambda x: jnp.sin(x).T, (WIDE,), 1),
    "a sine whose last dim stays": (lambda x: swapped(jnp.sin(x)), (ROWS,), 0),
    "a sine whose last dim moves": (lambda x: jnp.sin(x).transpose(0, 2, 1), (ROWS,), 1),
}
PRODUCTS = {
    "of matrices": (lambda x, w: jnp.tanh(x @ w).T, (floats(8192, 1024), floats(1024, 4096)), 0),
    "of matrices, added": (lambda x, w, y: (x @ w + y).T, (floats(8192, 1024), floats(1024, 4096), WIDE), 1),
    "of an array": (lambda w, x: swapped(x @ w), (WEIGHT, ROWS), 1),
    "of an array, before a sine": (lambda w, x: jnp.sin(swapped(x @ w)), (WEIGHT, ROWS), 1),
    "of an array, added": (lambda w, x, y: swapped(x @ w) + y, (WEIGHT, ROWS, ROWS), 1),
    "twice": (lambda w, x: swapped((x @ w) @ w), (WEIGHT, ROWS), 1),
    "of an array whose longest dim comes last": (lambda w, x: swapped(x @ w), (floats(1024, 768), LONG_ROWS), 0),
    "of an array, added to it": (lambda w, x: swapped(x + x @ w), (floats(1024, 1024), LONG_ROWS), 0),
    "of heads": (lambda w, x: (x @ w).reshape(256, 256, 4, 128).transpose(0, 2, 1, 3), (WEIGHT, ROWS), 1),
    "of stacks, transposed": (lambda a, b: (a @ b).transpose(0, 2, 1), (MATRICES, MATRICES), 0),
    "of stacks, side by side": (lambda a, b: swapped(a @ b), (MATRICES, MATRICES), 1),
    "of narrow heads": (attention, (NARROW, NARROW), 0),
    "of stacks, summed": (lambda a, b: jnp.exp(swapped(a @ b)).sum(0), (MATRICES, MATRICES), 0),
}
LOOPS = {
    "a stack": (lambda w, x: swapped(stacked(w, x)), (WEIGHT, ROWS), 0),
    "a stack whose last dim moves": (lambda w, x: stacked(w, x).transpose(0, 2, 1), (WEIGHT, ROWS), 0),
    "a stack of columns": (lambda w, x: stacked(w, x).transpose(1, 2, 0), (WEIGHT, ROWS), 1),
    "a stack, doubled": (lambda w, x: swapped(stacked(w, x)) * 2, (WEIGHT, ROWS), 2),
    "rows": (lambda w, x: last(w, swapped(x)), (WEIGHT, ROWS), 0),
    "rows that are summed, too": (lambda w, x: (last(w, swapped(x)), swapped(x * 2).sum(0)), (WEIGHT, ROWS), 0),
    "rounded weights": (lambda x, w: jax.lax.scan(layer, x, swapped(w))[0], (floats(512, 512), WEIGHTS), 1),
    "rows of a sine": (lambda w, x: last(w, swapped(jnp.sin(x))), (WEIGHT, ROWS), 1),
    "rows of two loops": (lambda w, x: (last(w, swapped(x)), last(w * 2, swapped(x)[::-1])), (WEIGHT, ROWS), 1),
}
PROGRAMS = {
    f"{kind}: {name}": program
    for kind, programs in {"from arguments": FROM_ARGUMENTS, "products": PRODUCTS, "loops": LOOPS}.items()
    for name, program in programs.items()
}
"""A function, its arguments, and how many arrays it stores beside its results."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_in_another_order_are_copied(name):
    check_temporaries(PROGRAMS[name], UNIT, parts=40)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_stores_as_many(name):
    check_compiled_temporaries(PROGRAMS[name], UNIT, parts=40)
