"""Which buffers XLA:GPU writes over, and which it keeps: of elementwise kernels, cuDNN and all-reduces."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers

import sharding
from sharding import P, cost

UNIT = 16 * 2**20
"""The bytes of an array of the programs."""


def multiplied():
    """Two kernels make two arrays; their product is written over one."""
    return (
        lambda x: jnp.fft.fft(jnp.fft.fft(x) * jnp.fft.fft(x + 1)).ravel()[:8],
        (jax.ShapeDtypeStruct((1024, 2048), jnp.complex64),),
        (P(),),
        (),
    )


def convolved():
    """cuDNN's results have scratch memory beside them: what is elementwise afterwards is written elsewhere."""

    def f(x, w):
        def convolution(x, stride):
            dims = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=dims)

        return convolution(jnp.sin(convolution(x, 1)), 8)

    x, w = jax.ShapeDtypeStruct((16, 64, 64, 64), jnp.float32), jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)
    return f, (x, w), (P(), P()), ()


def summed():
    """Gradients of replicated weights are all-reduced in place, also while other kernels run."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.square(y).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 4
    return step, (weights, jax.ShapeDtypeStruct((1024, 2048), jnp.float32)), (P(), P("data")), (0,)


def looked_up():
    """Gathered rows of a table are all-reduced into another buffer: XLA gathers them with a dim of size 1."""
    table = jax.ShapeDtypeStruct((8 * 1024, 2048), jnp.float32)
    ids = jax.ShapeDtypeStruct((2048,), jnp.int32)
    return lambda table, ids: table[ids].sum(1), (table, ids), (P("data"), P()), ()


def carried():
    """A loop carries what one kernel gathers from two tables, in the buffers of the gathered rows."""

    def body(_, carry):
        a, b = carry
        return jnp.tanh(a @ a), b + a

    def f(x, y, ids):
        return sum(z.sum() for z in jax.lax.fori_loop(0, 4, body, (x[ids], y[ids])))

    table = jax.ShapeDtypeStruct((256, 2048), jnp.float32)
    return f, (table, table, jax.ShapeDtypeStruct((2048,), jnp.int32)), (P(), P(), P()), ()


CASES = {
    "multiplied": (multiplied, 2),
    "convolved": (convolved, 2),
    "summed": (summed, 4),
    "looked up": (looked_up, 2),
    "carried": (carried, 3),
}
"""Programs, and the arrays that they need at once."""


def completed(name):
    """What a program is predicted to need, its function and arguments."""
    f, args, specs, donated = CASES[name][0]()
    jitted = sharding.jit(f, in_shardings=specs, donate_argnums=donated)
    return jitted.complete(*args).memory(platform="gpu"), jitted, args


@pytest.mark.parametrize("name", CASES)
def test_arrays_that_are_needed_at_once(name):
    with sharding.mesh(data=8, devices="h100:1x8"):
        memory, _, _ = completed(name)
    assert memory.temporary_bytes / UNIT == pytest.approx(CASES[name][1], rel=0.1)


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize("name", CASES)
def test_the_compiler_for_h100_needs_as_many(name):
    with sharding.mesh(data=8, devices=cost.compile_only("h100:1x8")):
        memory, jitted, args = completed(name)
        compiled = jitted.lower(*args).compile().memory_analysis()
    assert memory.temporary_bytes == pytest.approx(compiled.temp_size_in_bytes, rel=0.1)
