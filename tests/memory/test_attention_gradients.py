"""What XLA:GPU stores for gradients of attention: one kernel sums rows and computes the gradient of their softmax."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import check_compiled_temporaries, check_temporaries, compiled_bytes

import sharding
from sharding import P, cost
from sharding.memory import usage

BATCH, LENGTH, HEADS, WIDTH = 4, 512, 8, 64
SCORES = BATCH * HEADS * LENGTH**2


def attention(q, k, v, *, is_masked=True):
    scores = (jnp.einsum("bthd,bshd->bhts", q, k) * WIDTH**-0.5).astype(jnp.float32)
    if is_masked:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v)


def recomputed(q, k, v):
    return jax.checkpoint(attention)(jnp.sin(q), jnp.sin(k), jnp.sin(v))


def gradient_of(f):
    def loss(q, k, v, w):
        return (f(q, k, v).astype(jnp.float32) * w).sum()

    return jax.grad(loss, (0, 1, 2))


def arrays(dtype):
    return (jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, WIDTH), dtype),) * 4


PROGRAMS = {
    "causal": (gradient_of(attention), "bfloat16", 3),
    "of all positions": (gradient_of(partial(attention, is_masked=False)), "bfloat16", 3),
    "recomputed": (gradient_of(recomputed), "bfloat16", 3),
    "in 32 bits": (gradient_of(attention), "float32", 3),
}
"""A gradient, the dtype of its arguments, and how many arrays of all scores it stores in this dtype."""


def case(name):
    f, dtype, count = PROGRAMS[name]
    return (f, arrays(dtype), count), SCORES * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_stored(name):
    program, unit = case(name)
    check_temporaries(program, unit, "gpu", parts=5)


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_for_h100_does_so(name):
    program, unit = case(name)
    check_compiled_temporaries(program, unit, "h100:1x8", parts=5)


FEATURES, LAYERS = HEADS * WIDTH, 4


def scanned_step(weights, x):
    """A train step of scanned, recomputed attention with FSDP."""

    @jax.checkpoint
    def layer(h, w):
        q, k, v = (jnp.einsum("btf,fhd->bthd", h, w[name].astype(h.dtype)) for name in "qkv")
        return h + jnp.einsum("bthd,hdf->btf", attention(q, k, v), w["o"].astype(h.dtype)), None

    def loss(weights):
        h = jax.lax.scan(layer, x.astype("bfloat16"), weights)[0]
        return jnp.mean(h.astype("float32") ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


@pytest.mark.slow
@compilers.needs("jax_cuda13_plugin")
def test_the_peak_of_scanned_layers_on_h100():
    inward = jax.ShapeDtypeStruct((LAYERS, FEATURES, HEADS, WIDTH), "float32")
    weights = dict.fromkeys("qkv", inward) | {"o": jax.ShapeDtypeStruct((LAYERS, HEADS, WIDTH, FEATURES), "float32")}
    specs = dict.fromkeys("qkv", P(None, "data")) | {"o": P(None, None, None, "data")}
    x = jax.ShapeDtypeStruct((8 * BATCH, LENGTH, FEATURES), "float32")
    with sharding.mesh(data=8, devices=cost.compile_only("h100:1x8")):
        jitted = sharding.jit(scanned_step, in_shardings=(specs, P("data")), donate_argnums=0)
        found = usage(jitted.complete(weights, x).assignment, range(4), platform="gpu")
        compiled = compiled_bytes(jitted.lower(weights, x))
    assert found.peak_bytes == pytest.approx(compiled, rel=0.1)
