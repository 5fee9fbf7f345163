"""Arrays that kernels of XLA:TPU leave in VMEM take no HBM."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries, floats

ROWS, WIDE = 2048, 1024
SMALL, LARGE = floats(ROWS, WIDE), floats(8 * ROWS, WIDE)
hold = jax.lax.optimization_barrier


def of_several_ops(x):
    y = hold(jnp.sin(x) * x)
    return y + y.sum(0, keepdims=True)


def of_one_op(x):
    y = hold(jnp.sin(x))
    return y + y.sum(0, keepdims=True)


def of_a_product(x, w):
    y = hold(x @ w)
    return y + y.sum(0, keepdims=True)


def read_late(x, w, v):
    """Milliseconds later."""
    y = hold(jnp.sin(x) * x)
    for _ in range(4):
        w = hold((w @ v, y))[0]
    return y + w[:ROWS, :WIDE]


SQUARE = floats(8 * ROWS, 8 * ROWS)
PROGRAMS = {
    "a small array": (of_several_ops, (SMALL,), 0),
    "one larger than the memory": (of_several_ops, (LARGE,), 8),
    "of one op": (of_one_op, (SMALL,), 1),
    "of a product": (of_a_product, (SMALL, floats(WIDE, WIDE)), 1),
    "read late": (read_late, (SMALL, SQUARE, SQUARE), 1 + 192),
}
"""A program, its arguments, and how many small arrays it stores in HBM."""
UNIT = 4 * ROWS * WIDE


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_stays_in_vector_memory(name):
    check_temporaries(PROGRAMS[name], UNIT, parts=4)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_keeps_as_much(name):
    check_compiled_temporaries(PROGRAMS[name], UNIT, parts=4)
