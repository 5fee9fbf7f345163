"""Sums with a scatter into zeros, against compiled programs of XLA:CPU."""

import jax
import jax.numpy as jnp
import pytest
from support import peak_memory

import sharding
from sharding.memory import usage

ROWS, COLUMNS = 64, 4096


def scattered(x, index, updates):
    return jnp.zeros_like(x).at[jnp.arange(ROWS), index].add(updates)


PROGRAMS = {
    "added to what is computed": lambda x, y, *at: jnp.exp(x) * y + scattered(x, *at),
    "added from the left": lambda x, y, *at: scattered(x, *at) + jnp.exp(x) * y,
    "into what another op still reads": lambda x, y, *at: (z := jnp.exp(x), (z + scattered(x, *at)) @ y.T),
    "a scatter twice": lambda x, y, *at: (scattered(x, *at) + scattered(y, *at)) @ y.T,
    "two scatters": lambda x, y, i, u: (scattered(x, i, u) + scattered(x, i, jnp.exp(u))) @ y.T,
    "read twice": lambda x, y, *at: (z := scattered(x, *at), jnp.exp(x) + z),
    "not added": lambda x, y, *at: (jnp.exp(x) * scattered(x, *at)) @ y.T,
    "stored first, then multiplied": lambda x, y, *at: (jnp.sort(x) * y[:, :1] + scattered(x, *at)) @ x.T,
}


@peak_memory.newest_jax_only
@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_is_that_of_the_compiled_program(name):
    x, index = peak_memory.floats(ROWS, COLUMNS), jax.ShapeDtypeStruct((ROWS,), "int32")
    found = peak_memory.peak_of(PROGRAMS[name], x, x, index, peak_memory.floats(ROWS), sizes={"data": 8})
    assert found.ratio == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_gradient_of_logits_is_what_the_labels_are_scattered_into(platform):
    def loss(x, w, labels):
        logits = x @ w
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)
        return (jax.nn.logsumexp(logits, axis=1) - picked[:, 0]).mean()

    args = peak_memory.floats(256, 64), peak_memory.floats(64, 512), jax.ShapeDtypeStruct((256,), "int32")
    with sharding.mesh({"data": 1}, devices=jax.devices()[:1]):
        completed = sharding.jit(jax.grad(loss)).complete(*args)
    kernels = [k for step in usage(completed.assignment, platform=platform).lifetimes.steps for k in step.kernels]
    (scatter,) = [k.root for k in kernels if k.root.name == "scatter-add"]
    assert scatter.operands[0].name != "broadcast" and scatter.operands[0].shape == (256, 512)
