"""Compile time in classes, and the equal layers that a scan would compile once."""

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P

X, W = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")


def layer(w, x):
    q, k, v = (x @ w[name] for name in "qkv")
    return x + jnp.tanh(q * k) * v @ w["o"]


def unrolled(weights, x):
    for w in weights:
        x = layer(w, x)
    return jnp.sum(x)


def scanned(weights, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(w, x), None), x, weights)[0])


def weights(layers):
    return [dict.fromkeys("qkvo", W)] * layers


def stacked(layers):
    return dict.fromkeys("qkvo", jax.ShapeDtypeStruct((layers, 64, 64), "float32"))


def compile_time(f, *args, platform="cpu"):
    with sharding.mesh(data=2, model=4):
        return (
            sharding.jit(f, in_shardings=(None, P("data"))[: len(args)]).complete(*args).compile_time(platform=platform)
        )


@pytest.mark.parametrize("layers", [3, 12])
@pytest.mark.parametrize("f", [unrolled, jax.grad(unrolled, (0, 1))], ids=["inference", "gradient"])
def test_equal_layers_are_found(f, layers):
    found = compile_time(f, weights(layers), X).layers
    assert found is not None
    assert (found.count, found.is_initialisation) == (layers, False)
    assert "test_compile_time.py" in found.source
    assert f"{layers} equal layers" in str(found)
    assert "scan" in str(found)


def two_kinds(weights, x):
    for k, w in enumerate(weights):
        x = layer(w, x) if k % 2 else jnp.sin(x @ w["q"])
    return x


def test_layers_that_alternate_are_pairs():
    found = compile_time(two_kinds, weights(12), X).layers
    assert found is not None
    assert found.count == 6


@pytest.mark.parametrize("args", [(unrolled, weights(1), X), (unrolled, weights(2), X), (scanned, stacked(12), X)])
def test_no_hint_without_repeated_layers(args):
    assert compile_time(*args).layers is None


def different(weights, x):
    for k, w in enumerate(weights, 1):
        x = jnp.tanh(x @ w["q"][:, : 64 - k] @ w["o"][: 64 - k])
    return x


def test_layers_of_different_shapes_are_not_equal():
    assert compile_time(different, weights(8), X).layers is None


def test_initialisation():
    def init(key):
        return [jax.random.normal(k, (64, 64)) for k in jax.random.split(key, 8)]

    found = compile_time(init, jax.eval_shape(lambda: jax.random.key(0))).layers
    assert found is not None
    assert found.is_initialisation
    assert "jax.vmap" in str(found)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_a_scan_compiles_faster(platform):
    deep, shallow = (compile_time(jax.grad(unrolled), weights(n), X, platform=platform) for n in (96, 3))
    flat = compile_time(jax.grad(scanned), stacked(96), X, platform=platform)
    assert flat.seconds < deep.seconds / 2
    assert shallow.seconds < deep.seconds
    assert flat.rough == "seconds"
    assert deep.rough == "tens of seconds"


def test_a_deep_program_says_so_when_printed():
    with sharding.mesh(data=8):
        deep, shallow = (
            str(sharding.jit(jax.grad(unrolled), in_shardings=(None, P("data"))).complete(weights(n), X))
            for n in (96, 4)
        )
    assert "96 equal layers" in deep
    assert "equal layers" not in shallow
