"""Gradients that XLA:TPU reduces by one all-reduce, so that all of them are live before the first weight is updated."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support import compilers
from support.peak_memory import floats

import sharding
from sharding import P, cost
from sharding.memory import usage
from sharding.memory.kernel_order import MOST_REDUCED_BYTES

BATCH = 64


def lowered(layers, size, optimizer, devices):
    """A train step of a chain of layers whose weights each device has, and its memory as predicted."""

    def step(state, x):
        weights, slots = state

        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return (y * y).mean()

        updates, slots = optimizer.update(jax.grad(loss)(weights), slots, weights)
        return optax.apply_updates(weights, updates), slots

    weights = [floats(size, size)] * layers
    state = weights, jax.eval_shape(optimizer.init, weights)
    with sharding.mesh({"data": 8}, devices=devices):
        jitted = sharding.jit(step, in_shardings=(([P()] * layers, None), P("data")), donate_argnums=0)
        args = state, floats(BATCH, size)
        donated = range(len(jax.tree.leaves(state)))
        return jitted.lower(*args), usage(jitted.complete(*args).assignment, donated, platform="tpu")


ADAM, MOMENTUM = optax.adam(1e-3), optax.sgd(0.1, momentum=0.9)
STEPS = {
    "8 of 16 MiB": (8, 2048, ADAM, 7),
    "8 of 16 MiB, momentum": (8, 2048, MOMENTUM, 7),
    "20 of 9 MiB": (20, 1536, MOMENTUM, 13),
    "5 of 36 MiB": (5, 3072, ADAM, 3),
    "3 of 144 MiB": (3, 6144, ADAM, 1),
}
"""Layers, their size, the optimizer, and how many gradients are live at once."""


@pytest.mark.parametrize("name", STEPS)
def test_gradients_wait_for_those_of_the_same_all_reduce(name):
    layers, size, optimizer, live = STEPS[name]
    _, found = lowered(layers, size, optimizer, None)
    assert live == max(1, MOST_REDUCED_BYTES // (4 * size * size))
    assert found.lifetimes.peak_bytes() == pytest.approx(live * 4 * size * size, rel=0.03)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", STEPS)
def test_the_compiler_for_tpus_reduces_them_together(name):
    layers, size, optimizer, _ = STEPS[name]
    program, found = lowered(layers, size, optimizer, cost.compile_only("v5p:2x2x2"))
    assert found.peak_bytes == pytest.approx(program.compile().memory_analysis().peak_memory_in_bytes, rel=0.02)
