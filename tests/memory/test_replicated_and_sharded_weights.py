"""Train steps of a chain of layers on TPUs, whose weights are replicated or sharded in some way.

One all-reduce sums many gradients, so that all of them are live before the first weight is updated. One kernel updates
a weight and its moments. What frees most memory runs first, unless the program's order takes less.
"""

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


def lowered(layers, size, batch, optimizer, mesh, weights_spec, devices):
    """A train step, lowered, and its memory as predicted."""

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
    with sharding.mesh(mesh, devices=devices):
        in_shardings = ([weights_spec] * layers, None), P("data")
        jitted = sharding.jit(step, in_shardings=in_shardings, donate_argnums=0)
        args = state, floats(batch, size)
        donated = range(len(jax.tree.leaves(state)))
        return jitted.lower(*args), usage(jitted.complete(*args).assignment, donated, platform="tpu")


ADAM, MOMENTUM, LION = optax.adam(1e-3), optax.sgd(0.1, momentum=0.9), optax.lion(1e-3)
DATA = {"data": 8}
REPLICATED = {
    "8 of 16 MiB": (8, 2048, ADAM, 7),
    "8 of 16 MiB, momentum": (8, 2048, MOMENTUM, 7),
    "20 of 9 MiB": (20, 1536, MOMENTUM, 13),
    "5 of 36 MiB": (5, 3072, LION, 3),
    "3 of 144 MiB": (3, 6144, ADAM, 1),
}
"""Layers, their size, the optimizer, and how many gradients are live at once."""


@pytest.mark.parametrize("name", REPLICATED)
def test_gradients_wait_for_those_of_the_same_all_reduce(name):
    layers, size, optimizer, live = REPLICATED[name]
    _, found = lowered(layers, size, 64, optimizer, DATA, P(), None)
    assert live == max(1, MOST_REDUCED_BYTES // (4 * size * size))
    assert found.lifetimes.peak_bytes() == pytest.approx(live * 4 * size * size, rel=0.03)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", REPLICATED)
def test_the_compiler_for_tpus_reduces_them_together(name):
    layers, size, optimizer, _ = REPLICATED[name]
    program, found = lowered(layers, size, 64, optimizer, DATA, P(), cost.compile_only("v5p:2x2x2"))
    assert found.temporary_bytes == pytest.approx(program.compile().memory_analysis().temp_size_in_bytes, rel=0.03)


SHARDED = {
    "rows, few examples": (8, 2048, 1024, ADAM, DATA, P("data")),
    "rows": (4, 4096, 8192, ADAM, DATA, P("data")),
    "rows, many examples": (6, 2048, 32768, MOMENTUM, DATA, P("data")),
    "rows over a second axis": (8, 2048, 16384, LION, {"data": 2, "fsdp": 4}, P("fsdp")),
    "columns over a second axis": (8, 2048, 8192, ADAM, {"data": 2, "model": 4}, P(None, "model")),
}
"""Layers, their size, the batch, the optimizer, the mesh, and the spec of the weights."""


def test_a_weight_is_gathered_in_16_bits():
    """Of which products read it, also where its update reads all 32 bits of the shard."""
    layers, size, *rest = SHARDED["rows"]
    _, found = lowered(layers, size, *rest, None)
    gathers = [k.root for step in found.lifetimes.steps for k in step.kernels if k.root.name == "all-gather"]
    assert len(gathers) == layers
    assert {x.num_bytes for x in gathers} == {2 * size * size}


def test_all_devices_sum_what_each_keeps_a_part_of():
    """Over all devices of a slice, which compiles to no reduce-scatter; else each keeps only its part."""
    for name, kind, rows in (("rows", "all-reduce", 4096), ("rows over a second axis", "reduce-scatter", 512)):
        _, found = lowered(*SHARDED[name], None)
        size = SHARDED[name][1]
        kernels = [k.root for step in found.lifetimes.steps for k in step.kernels]
        assert [x.shape for x in kernels if x.name == kind and x.shape[1:] == (size,)] == [(rows, size)] * len(
            [x for x in kernels if x.name == "dot_general" and x.shape == (size, size)]
        )


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", SHARDED)
def test_temporaries_of_sharded_weights(name):
    program, found = lowered(*SHARDED[name], cost.compile_only("v5p:2x2x2"))
    assert found.temporary_bytes == pytest.approx(program.compile().memory_analysis().temp_size_in_bytes, rel=0.1)
