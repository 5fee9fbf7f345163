"""`zero.scan`: results and gradients of `jax.lax.scan`, gathers per unit, and gathered layers as many as asked for."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.compilers import devices
from support.peak_memory import newest_jax_only

import sharding
from sharding import P, ShardingError, zero

LAYERS, FEATURES, HIDDEN, BATCH = 12, 64, 256, 2048
WINDOWS = [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (12, 1), (2, 6)]
SHAPES = {
    "a": jax.ShapeDtypeStruct((8, 1024, 4096), "bfloat16"),
    "b": jax.ShapeDtypeStruct((8, 4096, 1024), "bfloat16"),
}
LAYER_BYTES = 2 * 4 * FEATURES * HIDDEN


def layer(x, w):
    return x + jnp.tanh(x @ w["a"]) @ w["b"], None


def weights(layers=LAYERS, features=FEATURES, hidden=HIDDEN):
    keys = jax.random.split(jax.random.key(0))
    a = jax.random.normal(keys[0], (layers, features, hidden)) / features**0.5
    return {"a": a, "b": jax.random.normal(keys[1], (layers, hidden, features)) / hidden}


STORED = {"a": P(None, None, "data"), "b": P(None, "data")}


def jitted(scan, body=layer):
    def loss(ws, x):
        return (scan(jax.checkpoint(body), x, ws)[0] ** 2).mean()

    return sharding.jit(jax.value_and_grad(loss), in_shardings=(STORED, P("data")))


def check_near(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b)


@pytest.mark.parametrize("remat", [True, False], ids=["remat", "residuals"])
@pytest.mark.parametrize(
    ("prefetch", "unit"), [*WINDOWS[-3:], *(pytest.param(*one, marks=pytest.mark.slow) for one in WINDOWS[:-3])]
)
def test_values_and_gradients_are_those_of_a_plain_scan(prefetch, unit, remat):
    """With several arrays in the carry, results per layer, integers among the layers, and an array closed over."""
    ws = weights(features=16, hidden=32) | {"number": jnp.arange(LAYERS)}
    x, scale = jax.random.normal(jax.random.key(1), (16, 16)), jnp.linspace(0.5, 1.5, 16)

    def loss(scan, ws, x, scale):
        def body(carry, w):
            x, total, count = carry
            y, _ = layer(x * scale[None], w)
            return (y, total + y.mean(0) * w["number"], count + 1), (y[0], w["number"])

        (x, total, count), (rows, numbers) = scan(jax.checkpoint(body) if remat else body, (x, scale * 0, 0), ws)
        return (x**2).mean() + total.sum() * count + (rows * numbers[:, None]).sum(), rows

    def run(scan):
        differentiated = jax.value_and_grad(functools.partial(loss, scan), (0, 1, 2), has_aux=True, allow_int=True)
        value, (of_ws, of_x, of_scale) = differentiated(ws, x, scale)
        return value, of_ws["a"], of_ws["b"], of_x, of_scale

    expected = jax.jit(functools.partial(run, jax.lax.scan))()
    with sharding.mesh(data=8):
        scan = functools.partial(zero.scan, prefetch=prefetch, unit=unit)
        check_near(jax.device_get(sharding.jit(functools.partial(run, scan))()), expected)


@pytest.mark.parametrize(("prefetch", "unit"), WINDOWS)
def test_units_are_gathered_at_once_and_gradients_scattered(prefetch, unit):
    with sharding.mesh(data=8):
        c = jitted(functools.partial(zero.scan, prefetch=prefetch, unit=unit)).complete(
            weights(), jnp.ones((BATCH, FEATURES))
        )
    ledger = [one for one in c.communication() if one.bytes > 4 * LAYERS]
    gathers = [(one.count, one.result_bytes) for one in ledger if one.kind == "all-gather"]
    per_unit = unit * LAYER_BYTES // 2
    units = LAYERS // unit
    # Of each of two arrays: the first units, and in the loops of both passes.
    assert sorted(gathers) == sorted([(1, per_unit)] * 2 * prefetch + [(units, per_unit)] * 4)
    scattered = [one for one in ledger if one.kind == "reduce-scatter"]
    assert sum(one.count for one in scattered) == 2 * LAYERS
    assert len(ledger) == len(gathers) + len(scattered)
    assert c.out_shardings[1] == STORED


@newest_jax_only
def test_no_more_layers_are_gathered_than_asked_for():
    def temporary_bytes(prefetch, unit):
        with sharding.mesh(data=8):
            step = jitted(functools.partial(zero.scan, prefetch=prefetch, unit=unit))
            args = weights(), jnp.ones((BATCH, FEATURES))
            compiled = step.lower(*args).compile().memory_analysis().temp_size_in_bytes
            predicted = step.complete(*args).memory().temporary_bytes
        assert abs(predicted / compiled - 1) <= 0.15, (prefetch, unit)
        return compiled

    for unit in (1, 2):
        plain, *ahead = [temporary_bytes(prefetch, unit) for prefetch in (0, 1, 2)]
        for prefetch, found in enumerate(ahead, 1):
            assert (found - plain) / LAYER_BYTES == pytest.approx(prefetch * unit, abs=0.1)


def test_a_step_keeps_no_gathered_layers():
    """Its temporary memory is that of few layers, not of all, with and without units ahead."""
    with sharding.mesh(data=8):
        for prefetch in (0, 1):
            step = jitted(functools.partial(zero.scan, prefetch=prefetch))
            compiled = step.lower(weights(), jnp.ones((8, FEATURES))).compile()
            assert compiled.memory_analysis().temp_size_in_bytes < LAYERS / 2 * LAYER_BYTES


def test_other_axes_stay():
    like = {"a": P(None, "tensor"), "b": P("tensor")}
    specs = {"a": P(None, "data", "tensor"), "b": P(None, "tensor", "data")}
    expected = jax.jit(lambda ws, x: jax.lax.scan(layer, x, ws)[0])(weights(), jnp.ones((16, FEATURES)))
    with sharding.mesh(data=4, tensor=2):
        f = sharding.jit(
            lambda ws, x: zero.scan(layer, x, ws, like=like, prefetch=1)[0], in_shardings=(specs, P("data"))
        )
        args = weights(), jnp.ones((16, FEATURES))
        gathered = [one for one in f.complete(*args).communication() if one.kind == "all-gather"]
        assert {one.result_bytes for one in gathered} == {LAYER_BYTES // 4}
        assert all(one.axes == ("data",) for one in gathered)
        check_near(jax.device_get(f(*args)), expected)


def test_training_with_a_sharded_optimizer_equals_one_device():
    """Layers gathered ahead, gradients accumulated over microbatches, state sharded as the layers are."""
    xs = jax.random.normal(jax.random.key(2), (4, 2, 64, FEATURES))

    def step_of(scan, tx):
        def loss(ws, x):
            return ((scan(jax.checkpoint(layer), x, ws)[0] - 1) ** 2).mean()

        def step(state, x):
            ws, inner = state

            def add(total, part):
                value, gradients = jax.value_and_grad(loss)(ws, part)
                return jax.tree.map(jnp.add, total, (value, gradients)), None

            (value, gradients), _ = jax.lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, ws)), x)
            updates, inner = tx.update(gradients, inner, ws)
            return (optax.apply_updates(ws, updates), inner), value

        return step

    def trained(step, state):
        values = []
        for x in xs:
            state, value = step(state, x)
            values.append(float(value))
        return values, jax.device_get(state[0])

    adam = optax.adam(1e-2)
    expected = trained(jax.jit(step_of(jax.lax.scan, adam)), (weights(), adam.init(weights())))
    with sharding.mesh(data=8):
        tx = zero.shard(adam, stage=3, like=jax.tree.map(lambda _: P(), STORED, is_leaf=lambda x: isinstance(x, P)))
        ws = {name: sharding.put(leaf, STORED[name]) for name, leaf in weights().items()}
        step = sharding.jit(step_of(functools.partial(zero.scan, unit=2), tx), in_shardings=(None, P(None, "data")))
        found = trained(step, (ws, sharding.jit(tx.init)(ws)))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found[1], expected[1])


@pytest.mark.parametrize(
    "options", [{"unit": 5}, {"unit": 0}, {"prefetch": -1}, {"prefetch": 1.5}, {"prefetch": 7, "unit": 2}], ids=str
)
def test_windows_that_there_are_not(options):
    with sharding.mesh(data=8), pytest.raises(ShardingError, match=r"(?s)zero\.scan.*12 layers"):
        zero.scan(layer, jnp.ones((16, FEATURES)), weights(), **options)


def test_other_mistakes():
    x = jnp.ones((16, FEATURES))
    with pytest.raises(ShardingError, match="no mesh"):
        zero.scan(layer, x, weights())
    with sharding.mesh(tensor=8), pytest.raises(ShardingError, match="axis 'data'"):
        zero.scan(layer, x, weights())
    with sharding.mesh(data=8), pytest.raises(ShardingError, match="1 specs for 2 arrays"):
        zero.scan(layer, x, weights(), like={"a": P()})


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"no {package}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("described", "begins", "ends", "product"),
    [
        pytest.param(
            "h100:1x8",
            r"= .* all-gather-start\(",
            r"= .* all-gather-done\(",
            "gemm_fusion",
            marks=needs("jax_cuda13_plugin"),
        ),
        pytest.param(
            "tpu7x:2x2x1",
            r"%all-gather\S*call-start = ",
            r"%all-gather\S*call-done = ",
            "kind=kOutput",
            marks=needs("libtpu"),
        ),
    ],
    ids=["h100", "tpu7x"],
)
def test_units_are_gathered_beside_products(described, begins, ends, product):
    """In the compiled forward loop, a unit ahead starts before a product and is there after it."""

    def overlapped(prefetch):
        with sharding.mesh({"data": 8}, devices=devices(described)):
            step = jitted(functools.partial(zero.scan, prefetch=prefetch))
            text = step.lower(SHAPES, jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)).compile().as_text()
        body = next(
            one for one in re.split(r"\n(?=%\S+ \()", text) if re.match(r"%\S*region_0", one) and product in one
        )
        lines = body.splitlines()
        starts = [k for k, line in enumerate(lines) if re.search(begins, line)]
        done = [k for k, line in enumerate(lines) if re.search(ends, line)]
        return bool(starts) and any(product in line for line in lines[starts[-1] : done[0]])

    assert overlapped(1) and not overlapped(0)
