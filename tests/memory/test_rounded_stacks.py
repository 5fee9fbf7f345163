"""Stacks of weights that a loop reads in bfloat16: XLA:TPU rounds them before it."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import compiled_temporary_bytes, temporary_bytes

SIZE, LAYERS = 2048, 32
CARRY, STACK = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((SIZE, SIZE), (LAYERS, SIZE, SIZE)))
HALF = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)
BYTES = 4 * LAYERS * SIZE * SIZE


def layers(f):
    return lambda x, stack: jax.lax.scan(lambda x, w: (x + f(x, w), None), x, stack)[0]


def cast(x, w):
    return x @ w.astype(jnp.bfloat16)


def gradient(x, stack):
    """Its loops read the rounded stack both, and the one behind writes the gradient; carries are kept."""
    body = jax.checkpoint(lambda x, w: (x + jnp.tanh(cast(x, w)), None))
    return jax.grad(lambda stack: jax.lax.scan(body, x, stack)[0].astype(jnp.float32).sum())(stack)


PROGRAMS = {
    "cast": (layers(cast), (HALF, STACK), 0.5),
    "multiplied at default precision": (layers(lambda x, w: jnp.tanh(x @ w)), (CARRY, STACK), 0.5),
    "transposed": (layers(lambda x, w: cast(x, w.T)), (HALF, STACK), 0.5),
    "computed": (lambda x, stack: layers(cast)(x, 2 * stack), (HALF, STACK), 0.5),
    "scaled in the loop": (layers(lambda x, w: cast(x, 2 * w)), (HALF, STACK), 0),
    "read in float32 too": (
        layers(lambda x, w: cast(x, w) + w.sum(0, keepdims=True).astype(x.dtype)),
        (HALF, STACK),
        0,
    ),
    "with its gradient": (gradient, (HALF, STACK), 1.0),
}
"""A program, its arguments, and the temporaries that it stores, relative to the stack."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_stack_is_rounded_before_the_loop(name):
    f, args, share = PROGRAMS[name]
    assert temporary_bytes(f, args, "tpu") == pytest.approx(share * BYTES, abs=BYTES / 10)


def test_it_is_not_on_gpus():
    assert temporary_bytes(layers(cast), (HALF, STACK), "gpu") < BYTES / 10


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_so_does_the_compiler_for_tpus(name):
    f, args, share = PROGRAMS[name]
    assert compiled_temporary_bytes(f, args, "v5p:2x2x2") == pytest.approx(share * BYTES, abs=BYTES / 10)
