"""What a mapped scan stacks is stored as its transpose, which no kernel of XLA:TPU makes."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries, floats

X, W = floats(64, 1024), floats(1024, 1024)
STEPS = 128
STACK = 4 * STEPS * 64 * 1024


def trajectory(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c), x, length=STEPS)[1]


def transposed(x, w):
    return jnp.swapaxes(trajectory(x, w), 0, 1)


def read_twice(x, w):
    stack = trajectory(x, w)
    return jnp.swapaxes(stack, 0, 1), stack.sum(0)


PROGRAMS = {"transposed": transposed, "also read as it is": read_twice}
NONE = 0.08
"""The rounded weight, in stacks."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_kernel_transposes_what_a_loop_stacks(name):
    check_temporaries((PROGRAMS[name], (X, W), NONE), STACK, parts=40)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_nor_does_the_compiler_for_tpus(name):
    check_compiled_temporaries((PROGRAMS[name], (X, W), NONE), STACK, parts=40)
