"""Sums of partial sums: one reduction on TPUs and GPUs, one each on CPUs."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P, cost
from sharding.cost import read_compiled

SIZES = {"data": 2, "model": 4}
COMPILERS = {
    "cpu": pytest.param("cpu", ""),
    "tpu": pytest.param(
        "tpu", "v5p:2x2x2", marks=pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu")
    ),
    "gpu": pytest.param(
        "gpu",
        "h100:1x8",
        marks=pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no cuda13"),
    ),
}


def floats(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def three_products(x, a, b, c):
    return x @ a + x @ b + x @ c


def two_are_used_again(x, a, b, c):
    first = x @ a
    return first + x @ b + x @ c, first


def through_reshapes(x, a, b, c):
    parts = [(x @ w).reshape(64, 16, 32) for w in (a, b, c)]
    return parts[0] + parts[1] + parts[2]


def through_converts(x, a, b, c):
    narrow = [(x.astype("bfloat16") @ w.astype("bfloat16")).astype("float32") for w in (a, b, c)]
    return narrow[0] + narrow[1] + narrow[2]


def a_gradient(x, a, b, c):
    def loss(x):
        h = jnp.sin(x)
        return sum(jnp.sum(jnp.tanh(h @ w.T)) for w in (a, b, c))

    return jax.grad(loss)(x)


def other_axes(x, a, b, c):
    across = sharding.annotate(jnp.sin(x), P(None, "data")) @ sharding.annotate(jnp.cos(b), P("data"))
    return x @ a + sharding.annotate(across, P()) + x @ c


PROGRAMS = {
    "three products": (three_products, 1),
    "two are used again": (two_are_used_again, 3),
    "through reshapes": (through_reshapes, 1),
    "through converts": (through_converts, 1),
    "a gradient": (a_gradient, 1),
    "other axes": (other_axes, 3),
}
"""Program -> the all-reduces that are left on TPUs and GPUs."""

ARGS = (floats(64, 1024), floats(1024, 512), floats(1024, 512), floats(1024, 512))
SPECS = (P(None, "model"), P("model"), P("model"), P("model"))
GRADIENT = (P(), P("model"), P("model"), P("model"))


def step(name):
    run, _ = PROGRAMS[name]
    args = (floats(64, 512), *ARGS[1:]) if run is a_gradient else ARGS
    jitted = sharding.jit(run, in_shardings=GRADIENT if run is a_gradient else SPECS, out_shardings=P())
    return jitted, args


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_reduction_is_left(name):
    with sharding.mesh(SIZES):
        jitted, args = step(name)
        ledger = jitted.complete(*args).communication()
    kept = [c for c in ledger.lowered("gpu") if c.kind == "all-reduce"]
    assert len(kept) == PROGRAMS[name][1]
    assert len([c for c in ledger.lowered("cpu") if c.kind == "all-reduce"]) == 3
    assert all(c.source for c in kept)


@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_compiled(name, backend, described):
    devices = cost.compile_only(described) if described else jax.devices()[:8]
    with sharding.mesh(SIZES, devices=devices):
        jitted, args = step(name)
        predicted = jitted.complete(*args).communication().lowered(backend).by_kind()
        assert read_compiled(jitted.lower(*args).compile()).by_kind() == predicted
