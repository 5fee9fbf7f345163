"""What XLA:GPU computes in the kernels of pools and cumulative sums, and all compilers in those of argmax."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import compilers
from support.peak_memory import compiled_temporary_bytes, temporary_bytes

import sharding

IMAGES = jax.ShapeDtypeStruct((16, 128, 128, 64), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((64, 64), jnp.float32)
SIZE = 4 * 16 * 128 * 128 * 64


def largest(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def smoothed(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


PROGRAMS = {
    "pooled": (lambda x: 2 * largest(jnp.exp(x)), (IMAGES,), 0),
    "pooled and read": (lambda x: (lambda e: (largest(e), 2 * e))(jnp.exp(x)), (IMAGES,), 0),
    "pooled for a product": (lambda x, w: largest(2 * x) @ w, (IMAGES, MATRIX), SIZE // 4),
    "smoothed": (lambda x: 2 * smoothed(jnp.square(x) + 1), (IMAGES,), 0),
    "summed up": (lambda x: 2 * jnp.cumsum(x + 1, 3), (IMAGES,), 0),
}
"""A program, its arguments, and its temporary bytes."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_pools_compute_what_they_read(name):
    f, args, num_bytes = PROGRAMS[name]
    assert temporary_bytes(f, args, "gpu") == pytest.approx(num_bytes, abs=SIZE // 10)


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_h100_does_so(name):
    f, args, num_bytes = PROGRAMS[name]
    assert compiled_temporary_bytes(f, args, "h100:1x8") == pytest.approx(num_bytes, abs=SIZE // 10)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_an_argmax_computes_what_it_reads(platform):
    assert temporary_bytes(lambda x: jnp.argmax(jnp.square(x) + 1, 1), (IMAGES,), platform) < SIZE // 10
    assert temporary_bytes(lambda x: jnp.argmin(jnp.exp(x), -1), (IMAGES,), platform) < SIZE // 10


def test_so_does_that_of_the_compiler_for_cpus():
    with sharding.mesh({"data": 1}, devices=jax.devices()[:1]):
        compiled = sharding.jit(lambda x: jnp.argmax(jnp.square(x) + 1, 1)).lower(IMAGES).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < SIZE // 10
