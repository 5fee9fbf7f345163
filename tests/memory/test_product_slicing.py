"""Products of which only a slice is read take no more memory on accelerators than that."""

import jax
import jax.numpy as jnp
import pytest
from support import compilers
from support.peak_memory import floats

import sharding
from sharding import P, cost
from sharding.memory import usage

ROWS, COLUMNS = 1024, 8192
X, W = floats(16, ROWS, 1024), floats(1024, COLUMNS)
UNIT = 4 * X.shape[0] // 2 * ROWS * COLUMNS // 4
"""The bytes of a product on one device."""


def losses(logits, tokens):
    picked = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - picked


def widened(x, w):
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


def next_tokens(x, w):
    """The usual loss of a language model: the last logits predict nothing."""
    return losses((x @ w)[:, :-1], jnp.zeros((16, ROWS - 1), jnp.int32))


PROGRAMS = {
    "maxima of rows": (lambda x, w: (x @ w)[:, :-1].max(-1), {"tpu": 0, "gpu": 1}),
    "elementwise": (lambda x, w: jax.nn.gelu((x @ w)[:, :-1]), {"tpu": 0, "gpu": 0}),
    "after ops": (lambda x, w: jnp.abs((x @ w) * 3)[:, :-1].max(-1), {"tpu": 1, "gpu": 1}),
    "widened": (lambda x, w: widened(x, w)[:, :-1].max(-1), {"tpu": 0, "gpu": 0.5}),
    "next tokens": (next_tokens, {"tpu": 1, "gpu": 1}),
    "the whole is read, too": (lambda x, w: ((x @ w)[:, :-1].max(-1), (x @ w).min(-1)), {"tpu": 1, "gpu": 1}),
}
"""Program -> what it computes, and the products that are stored on each platform."""


def memory_of(f, platform, described):
    """The predicted memory of a program, its jitted function and arguments."""
    with sharding.mesh(data=2, model=4, devices=described):
        jitted = sharding.jit(f, in_shardings=(P("data"), P(None, "model")))
        completion = jitted.complete(X, W)
    return usage(completion.assignment, platform=platform), jitted


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_only_the_slice_is_computed(name, platform):
    f, stored = PROGRAMS[name]
    found, _ = memory_of(f, platform, {"tpu": "v5p:2x2x2", "gpu": "h100:1x8"}[platform])
    assert found.temporary_bytes / UNIT == pytest.approx(stored[platform], abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "described"), [compilers.COMPILERS["tpu"], compilers.COMPILERS["gpu"]])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_compiled(name, platform, described):
    found, jitted = memory_of(PROGRAMS[name][0], platform, cost.compile_only(described))
    with sharding.mesh(data=2, model=4, devices=cost.compile_only(described)):
        compiled = jitted.lower(X, W).compile().memory_analysis()
    assert found.temporary_bytes == pytest.approx(compiled.temp_size_in_bytes, abs=UNIT / 50)
