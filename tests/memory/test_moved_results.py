"""Results that other devices write are copied by XLA:TPU, and so are donated arguments whose buffers they take."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support import compilers
from support.peak_memory import floats

import sharding
from sharding import P, cost
from sharding.memory import usage

ROWS, WIDE = 8192, 4096
ARRAY = floats(ROWS, WIDE)
UNIT = 4 * ROWS * WIDE
NUM_DEVICES = 8


def part(x):
    rows = ROWS // NUM_DEVICES
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("data") * rows, rows)


def gather(x):
    return jax.lax.all_gather(x, "data", tiled=True)


def permute(x):
    return jax.lax.ppermute(x, "data", [(k, (k + 1) % NUM_DEVICES) for k in range(NUM_DEVICES)])


def gathered(x):
    return gather(jnp.sin(part(x)))


def two_gathered(x, y):
    return gather(jnp.sin(part(x))), gather(jnp.cos(part(y)))


def gathered_and_widened(x):
    return gather(jnp.sin(part(x)).astype(jnp.bfloat16)).astype(jnp.float32)


def gathered_in_a_loop(x):
    return jax.lax.scan(lambda c, _: (gathered(c), None), x, None, length=3)[0]


PROGRAMS = {
    "gathered": (gathered, (), 1),
    "gathered, donated": (gathered, (0,), 1),
    "gathered and held back, donated": (lambda x: jax.lax.optimization_barrier(gathered(x)), (0,), 1),
    "two gathered, donated": (two_gathered, (0, 1), 2),
    "gathered and widened": (gathered_and_widened, (0,), 0.5),
    "gathered in a loop": (gathered_in_a_loop, (0,), 1),
    "permuted": (permute, (), 1),
    "permuted, donated": (permute, (0,), 1),
    "computed and permuted, donated": (lambda x: permute(jnp.sin(x)), (0,), 2),
    "exchanged, donated": (lambda x: jax.lax.all_to_all(jnp.sin(x), "data", 0, 0, tiled=True), (0,), 2),
}
"""What each device computes, the donated arguments, and how many arrays it stores beside arguments and results."""


def of_program(f, donated, devices=None):
    """A program of replicated arguments, jitted, and its memory as predicted."""
    num_arguments = 2 if f is two_gathered else 1
    args = [ARRAY] * num_arguments
    with sharding.mesh({"data": NUM_DEVICES}, devices=devices):
        mapped = jax.shard_map(f, in_specs=(P(),) * num_arguments, out_specs=P(), check_vma=False)
        jitted = sharding.jit(mapped, donate_argnums=donated)
        return jitted.lower(*args), usage(jitted.complete(*args).assignment, donated, platform="tpu")


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_copied(name):
    f, donated, count = PROGRAMS[name]
    _, found = of_program(f, donated)
    assert found.temporary_bytes == pytest.approx(count * UNIT, abs=UNIT / 50)


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_tpus_copies_as_much(name):
    f, donated, count = PROGRAMS[name]
    lowered, _ = of_program(f, donated, cost.compile_only("v5p:2x2x2"))
    compiled = lowered.compile().memory_analysis().temp_size_in_bytes
    assert compiled == pytest.approx(count * UNIT, abs=UNIT / 50)


LAYERS, SIZE = 4, 2048


def of_zero_step(devices=None):
    """A train step whose moments are sharded and whose weights are gathered in the end, and its memory as predicted."""
    optimizer = optax.adam(1e-3)

    def step(state, x):
        weights, moments = state

        def loss(weights):
            y = x
            for up, down in weights:
                y = y + jax.nn.gelu(y @ up) @ down
            return (y * y).mean()

        updates, moments = optimizer.update(jax.grad(loss)(weights), moments, weights)
        weights = optax.apply_updates(weights, updates)
        return jax.tree.map(lambda w: sharding.annotate(w, P("data")), weights), moments

    weights = [(floats(SIZE, 4 * SIZE), floats(4 * SIZE, SIZE))] * LAYERS
    moments = jax.eval_shape(optimizer.init, weights)
    specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), moments)
    args = (weights, moments), floats(ROWS, SIZE)
    with sharding.mesh({"data": NUM_DEVICES}, devices=devices):
        jitted = sharding.jit(step, in_shardings=((P(), specs), P("data")), donate_argnums=0)
        donated = range(len(jax.tree.leaves(args[0])))
        return jitted.lower(*args), usage(jitted.complete(*args).assignment, donated, platform="tpu")


def test_weights_that_are_gathered_after_their_update_are_copied_from_the_start():
    _, found = of_zero_step()
    assert found.lifetimes.timeline()[0] >= 2 * LAYERS * 16 * SIZE**2


@pytest.mark.slow
@compilers.needs("libtpu")
def test_the_peak_of_a_step_with_sharded_moments():
    lowered, found = of_zero_step(cost.compile_only("v5p:2x2x2"))
    memory = lowered.compile().memory_analysis()
    own = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    compiled = own + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert found.peak_bytes == pytest.approx(compiled, rel=0.1)
