"""Training with sharded optimizer state equals training without, and each device holds its shard of the bytes."""

import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding
from sharding import P, ShardingError, zero
from sharding.cost import compile_only, read_compiled
from sharding.zero import sharded_optimizer

FEATURES, HIDDEN, SAMPLES, STEPS = 16, 32, 16, 20


def params(dtype=jnp.float32):
    generator = np.random.default_rng(0)
    shapes = {"a": (FEATURES, HIDDEN), "b": (HIDDEN, FEATURES), "bias": (FEATURES,)}
    return {name: jnp.asarray(generator.normal(size=shape) / 4, dtype) for name, shape in shapes.items()}


def batches():
    generator = np.random.default_rng(1)
    return generator.normal(size=(STEPS, 2, SAMPLES, FEATURES)).astype(np.float32)


def loss(params, x, y):
    h = jnp.tanh(x @ params["a"])
    return jnp.square(h @ params["b"] + params["bias"].reshape(1, -1) - y).mean()


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
}


def step_of(tx, *, applies=False, prepare=lambda params: params):
    def step(state, x, y):
        params, inner = state
        value, gradients = jax.value_and_grad(lambda params: loss(prepare(params), x, y))(params)
        if applies:
            return tx.apply(gradients, inner, params), value
        updates, inner = tx.update(gradients, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    return step


@functools.cache
def reference(name):
    """Losses and final parameters on one device."""
    tx = OPTIMIZERS[name]()
    step, state, losses = jax.jit(step_of(tx)), (params(), tx.init(params())), []
    for x, y in batches():
        state, value = step(state, x, y)
        losses.append(value)
    return np.asarray(losses), jax.tree.map(np.asarray, state[0])


def trained(name, stage, axes, *, applies=False, **options):
    with sharding.mesh(axes, devices=jax.devices()[: math.prod(axes.values())]):
        tx = zero.shard(OPTIMIZERS[name](), stage=stage, **options)
        specs = zero.specs(params(), stage=stage, **options)
        start = jax.tree.map(lambda leaf, spec: sharding.put(leaf, spec), params(), specs.params)
        state = start, sharding.jit(tx.init)(start)
        batch = P((*axes,))
        prepare = functools.partial(zero.split, **options) if stage == 3 else lambda params: params
        step = sharding.jit(step_of(tx, applies=applies, prepare=prepare), donate_argnums=0)
        losses = []
        for x, y in batches():
            state, value = step(state, sharding.put(x, batch), sharding.put(y, batch))
            losses.append(np.asarray(value))
    return np.asarray(losses), state, specs


def check(name, found):
    losses, state, _ = found
    expected, last = reference(name)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), jax.device_get(state[0]), last)


def max_bytes_per_device(tree):
    """Bytes on the fullest device."""
    found = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return max(found.values())


@pytest.mark.parametrize(("name", "stage", "applies"), [("adamw", 1, False), ("clipped", 2, True), ("adamw", 3, False)])
def test_training_equals_one_device(name, stage, applies):
    found = trained(name, stage, {"data": 8}, applies=applies)
    check(name, found)
    num = sum(leaf.size for leaf in jax.tree.leaves(params()))
    own, inner = found[1]
    moments = [leaf for leaf in jax.tree.leaves(inner) if leaf.ndim]
    over = 8 if stage == 3 else 1
    assert max_bytes_per_device(own) == 4 * num / over
    assert max_bytes_per_device(moments) == 8 * num / 8


@pytest.mark.parametrize("stage", [2, 3])
def test_updates_that_are_gathered_as_for_tpus(stage, monkeypatch):
    monkeypatch.setattr(sharded_optimizer, "platform", lambda: "tpu")
    found = trained("clipped", stage, {"data": 8}, applies=True)
    check("clipped", found)
    num = sum(leaf.size for leaf in jax.tree.leaves(params()))
    assert max_bytes_per_device(found[1][0]) == 4 * num / (8 if stage == 3 else 1)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_applying_updates_stores_no_more_than_adding_them():
    """What XLA:TPU stores beside arguments and results: one or two updates, not all new parameters again."""
    features, layers = 2048, 8
    shapes = {str(k): jax.ShapeDtypeStruct((features, features), jnp.float32) for k in range(layers)}

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    def temporary_bytes(tx, applies):
        def step(state, x):
            params, inner = state
            gradients = jax.grad(loss)(params, x)
            if applies:
                return tx.apply(gradients, inner, params)
            updates, inner = tx.update(gradients, inner, params)
            return optax.apply_updates(params, updates), inner

        args = (shapes, jax.eval_shape(tx.init, shapes)), jax.ShapeDtypeStruct((1024, features), jnp.float32)
        run = sharding.jit(step, donate_argnums=0, in_shardings=((P(), None), P("data")))
        return run.lower(*args).compile().memory_analysis().temp_size_in_bytes

    with sharding.mesh(data=8, devices=compile_only("v5p:2x2x2")):
        tx = zero.shard(optax.adamw(1e-2))
        applied, added = (temporary_bytes(tx, applies) for applies in (True, False))
    assert applied <= added < layers * 4 * features**2


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 8}, {"replica": 2, "data": 4}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("applies", [False, True], ids=["update", "apply"])
def test_training_on_a_grid(name, stage, axes, applies):
    found = trained(name, stage, axes, applies=applies, replicas="replica" if "replica" in axes else None)
    check(name, found)
    for leaf in jax.tree.leaves(found[1][1]):
        if leaf.ndim and leaf.size > 1:
            assert leaf.addressable_shards[0].data.size == leaf.size / axes["data"]


@pytest.mark.parametrize("applies", [False, True], ids=["update", "apply"])
def test_half_precision_with_master_weights(applies):
    """Master weights follow float32 training; parameters are rounded from them."""
    half = functools.partial(params, jnp.bfloat16)

    def half_loss(params, x, y):
        return loss(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), x, y)

    tx = optax.adamw(1e-2)
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half())
    inner = tx.init(weights)

    @jax.jit
    def plain(weights, inner, x, y):
        rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
        gradients = jax.grad(half_loss)(rounded, x, y)
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
        updates, inner = tx.update(gradients, inner, weights)
        return optax.apply_updates(weights, updates), inner

    with sharding.mesh(data=8):
        sharded = zero.shard(optax.adamw(1e-2), stage=2, master=True)

        def step(state, x, y):
            own, inner = state
            gradients = jax.grad(half_loss)(own, x, y)
            if applies:
                return sharded.apply(gradients, inner, own)
            updates, inner = sharded.update(gradients, inner, own)
            return optax.apply_updates(own, updates), inner

        start = sharding.put(half(), P())
        state = start, sharding.jit(sharded.init)(start)
        run = sharding.jit(step, donate_argnums=0)
        for x, y in batches()[:8]:
            weights, inner = plain(weights, inner, x, y)
            state = run(state, sharding.put(x, P("data")), sharding.put(y, P("data")))
    num = sum(leaf.size for leaf in jax.tree.leaves(weights))
    assert max_bytes_per_device(state[1].weights) == 4 * num / 8
    assert max_bytes_per_device(state[0]) == 2 * num
    found = jax.device_get(state)
    for name, leaf in found[1].weights.items():
        np.testing.assert_allclose(leaf, weights[name], rtol=1e-2, atol=1e-3)  # gradients are rounded to 8 bits
        np.testing.assert_array_equal(found[0][name], leaf.astype(jnp.bfloat16))


def test_an_indivisible_parameter_is_reported():
    with sharding.mesh(data=8):
        tx = zero.shard(optax.adamw(1e-2))
        with pytest.warns(
            UserWarning, match=r"divides no dim of odd \(60 bytes\); 60 bytes stay replicated on each device"
        ):
            tx.init({"odd": jnp.zeros((3, 5)), "even": jnp.zeros(16)})


def test_errors():
    with pytest.raises(ShardingError, match="one of 1, 2, 3"):
        zero.shard(optax.adamw(1e-2), stage=4)
    tx = zero.shard(optax.adamw(1e-2))
    with pytest.raises(ShardingError, match="no mesh"):
        tx.init(params())
    with sharding.mesh(data=8):
        state = tx.init(params())
        with pytest.raises(ShardingError, match="params as the third argument"):
            tx.update(params(), state)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("stage", [2, 3])
def test_collectives_compiled_ahead_of_time_for_tpus(stage):
    """Gradients are reduce-scattered and parameters all-gathered; no full gradient is all-reduced."""
    features, samples = 512, 65_536  # large, so that moving parameters is cheaper than moving activations

    def shapes():
        return {name: jax.ShapeDtypeStruct((features, features), jnp.float32) for name in ("a", "b")}

    def loss(params, x):
        return jnp.square(jnp.tanh(x @ params["a"]) @ params["b"]).mean()

    def step(state, x):
        own, inner = state
        value, gradients = jax.value_and_grad(loss)(own, x)
        return tx.apply(gradients, inner, own), value

    with sharding.mesh(data=4, devices=compile_only("v5p:2x2x1")) as mesh:
        tx = zero.shard(optax.adamw(1e-2), stage=stage)
        specs = zero.specs(shapes(), stage=stage)
        run = sharding.jit(step, donate_argnums=0, in_shardings=((specs.params, None), P("data")))
        args = (shapes(), jax.eval_shape(tx.init, shapes())), jax.ShapeDtypeStruct((samples, features), jnp.float32)
        found = read_compiled(run.lower(*args).compile(), mesh=mesh)
    kinds = {kind: count for kind, (count, _) in found.by_kind().items()}
    assert kinds["reduce-scatter"] == 2
    assert kinds["all-gather"] >= 2
    assert all(c.result_bytes < 4 * features for c in found.collectives if c.kind == "all-reduce")
