"""Optimizer state in the host's memory, streamed group by group, and the delayed update."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding
from sharding import P, ShardingError, zero
from sharding.cost import compile_only
from sharding.graph.straight_line import trace_program
from sharding.zero import host_state, streamed_update

FEATURES, HIDDEN, SAMPLES, STEPS = 16, 32, 16, 20
MESHES = [{"data": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
}


def params(dtype=jnp.float32):
    generator = np.random.default_rng(0)
    shapes = {"a": (FEATURES, HIDDEN), "b": (HIDDEN, FEATURES), "bias": (FEATURES,)}
    return {name: jnp.asarray(generator.normal(size=shape) / 4, dtype) for name, shape in shapes.items()}


def batches():
    return np.random.default_rng(1).normal(size=(STEPS, 2, SAMPLES, FEATURES)).astype(np.float32)


def loss(params, x, y):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    h = jnp.tanh(x @ params["a"])
    return jnp.square(h @ params["b"] + params["bias"].reshape(1, -1) - y).mean()


def step_of(tx, *, applies=True, **options):
    def step(state, x, y):
        own, inner = state
        value, gradients = jax.value_and_grad(loss)(own, x, y)
        if applies:
            return tx.apply(gradients, inner, own, **options), value
        updates, inner = tx.update(gradients, inner, own)
        return (optax.apply_updates(own, updates), inner), value

    return step


def trained(name, axes, *, dtype=jnp.float32, applies=True, steps=STEPS, **options):
    """Losses and the last state of training on a mesh."""
    with sharding.mesh(axes):
        tx = zero.shard(OPTIMIZERS[name](), **options)
        start = sharding.put(params(dtype), P())
        state = start, sharding.jit(tx.init)(start)
        step = sharding.jit(step_of(tx, applies=applies), donate_argnums=0)
        losses = []
        for x, y in batches()[:steps]:
            state, value = step(state, sharding.put(x, P("data")), sharding.put(y, P("data")))
            losses.append(np.asarray(value))
    return losses, state


def kinds(state):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim}


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(expected))


@pytest.mark.parametrize(
    ("axes", "name", "options"),
    [
        (MESHES[0], "clipped", {"stage": 2, "master": True, "dtype": jnp.bfloat16}),
        (MESHES[1], "adamw", {"stage": 1, "applies": False}),
    ],
    ids=["2x4", "2x2x2"],
)
def test_training_is_the_same_bit_for_bit(axes, name, options):
    expected, found = trained(name, axes, **options), trained(name, axes, offload="host", **options)
    assert_equal(found, expected)
    assert kinds(found[1][1]) == {"pinned_host"} and kinds(expected[1][1]) == {"device"}


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=["2x4", "2x2x2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("master", [False, True], ids=["", "master"])
@pytest.mark.parametrize("applies", [False, True], ids=["update", "apply"])
def test_training_on_a_grid(axes, name, stage, master, applies):
    train = functools.partial(trained, name, axes, stage=stage, master=master, applies=applies)
    expected, found = train(), train(offload="host")
    assert_equal(found, expected)
    assert kinds(found[1][1]) == {"pinned_host"}


def emulated(name, delay_after):
    """Training with the delay on one device: each gradient is kept for a step, from the one after the warm-up on."""
    tx = OPTIMIZERS[name]()
    own, waiting = params(), None
    inner, losses = tx.init(own), []
    gradient, update = jax.jit(jax.value_and_grad(loss)), jax.jit(tx.update)
    for k, (x, y) in enumerate(batches()):
        value, gradients = gradient(own, x, y)
        losses.append(np.asarray(value))
        applied, waiting = (gradients, None) if k < delay_after else (waiting, gradients)
        if applied is not None:
            updates, inner = update(applied, inner, own)
            own = optax.apply_updates(own, updates)
    return losses, own, inner


@pytest.mark.parametrize("delay_after", [0, 5])
@pytest.mark.parametrize("name", ["clipped", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_delayed_update_is_that_of_an_emulator_on_one_device(name, delay_after):
    losses, (own, state) = trained(name, MESHES[0], offload="host", delay_after=delay_after)
    expected, last, _ = emulated(name, delay_after)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), jax.device_get(own), last)
    assert int(state.steps) == STEPS and kinds(state) == {"pinned_host"}


def test_a_delayed_update_is_the_same_on_the_device():
    train = functools.partial(trained, "clipped", MESHES[0], delay_after=3, steps=8)
    assert_equal(train(offload="host"), train())


def test_after_the_warm_up_a_program_without_it_goes_on_from_the_state():
    """`delay_after=0` continues where `delay_after=3` is, and there no update depends on its step's gradient."""
    with sharding.mesh(MESHES[0]):
        both = [zero.shard(OPTIMIZERS["clipped"](), offload="host", delay_after=n) for n in (3, 0)]
        start = sharding.put(params(), P())
        state = start, sharding.jit(both[0].init)(start)
        first, second = (sharding.jit(step_of(tx)) for tx in both)
        for x, y in batches()[:4]:
            state, _ = first(state, x, y)
        x, y = batches()[4]
        assert_equal(second(state, x, y), first(state, x, y))
        gradients = jax.grad(loss)(state[0], x, y)

        def new_parameters(gradients):
            return jax.tree.leaves(both[1].apply(gradients, state[1], state[0])[0])

        tree = jax.tree.structure(gradients)
        program = trace_program(lambda *leaves: new_parameters(tree.unflatten(leaves)), *gradients.values())
        assert program.dependents(program.inputs).isdisjoint(program.outputs)


@pytest.mark.parametrize("delay_after", [None, 0], ids=["", "delayed"])
def test_a_false_condition_leaves_everything_as_it_is(delay_after):
    with sharding.mesh(MESHES[0]):
        tx = zero.shard(OPTIMIZERS["clipped"](), offload="host", delay_after=delay_after)
        start = sharding.put(params(), P())
        state, (x, y) = (start, sharding.jit(tx.init)(start)), batches()[0]
        for flag in (True, True, False):
            before, (state, _) = state, sharding.jit(step_of(tx, only_if=jnp.array(flag)))(state, x, y)
        assert not np.array_equal(before[0]["a"], start["a"])
        assert_equal(state, before)


def groups_of(update, *arrays):
    program = trace_program(update, *arrays)
    found = streamed_update._Dependence(program, program.inputs)
    return [[len(group.arrays) for group in found.groups(k)] for k in range(found.num_phases)]


def test_groups_are_what_has_to_be_together():
    x = jnp.ones((8, 8))
    assert groups_of(lambda a, b, c: [a + 1, b * 2, c], x, x, x) == [[1, 1, 1]]
    assert groups_of(lambda a, b, c: [a + b, b * 2, c], x, x, x) == [[2, 1]]
    assert groups_of(lambda a, b, c: [a / jnp.sum(a), b, c], x, x, x) == [[1, 1, 1]]
    # A norm of all of them is computed first, and then they are read again.
    norm = lambda a, b, c: jnp.sqrt(jnp.sum(a) + jnp.sum(b) + jnp.sum(c))  # noqa: E731
    assert groups_of(lambda a, b, c: [a / norm(a, b, c), b, c], x, x, x) == [[1, 1, 1], [1, 1, 1]]
    stacked = lambda a, b: jnp.max(jnp.stack([jnp.sum(a), jnp.sum(b)]))  # noqa: E731
    assert groups_of(lambda a, b, c: [a * stacked(a, b), b, c], x, x, x) == [[1, 1], [1, 1, 1]]


def test_arrays_that_come_together_one_after_the_other_are_one_group():
    def update(a, b, c, d):
        return [a + b, c + a, d + c]

    assert groups_of(update, *[jnp.ones((8, 8))] * 4) == [[4]]


def test_small_groups_are_read_together():
    x, small = jnp.ones((8, 8)), jnp.ones(8)
    program = trace_program(lambda *arrays: [a + 1 for a in arrays], x, small, small, x)
    found = streamed_update._Dependence(program, program.inputs)
    assert [len(group.arrays) for group in streamed_update._packed(found.groups(0))] == [1, 2, 1]


def test_callbacks_of_an_optimizer_run_once():
    seen = []

    def update(updates, state, params=None):
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(state))
        jax.debug.callback(seen.append, state["a"])
        return jax.tree.map(lambda u, s: u + s + total, updates, state), state

    with sharding.mesh(data=8):
        tx = zero.shard(optax.GradientTransformation(lambda p: jax.tree.map(jnp.ones_like, p), update), offload="host")
        state = tx.init(params())
        out, _ = jax.jit(tx.update)(params(), state, params())
        jax.effects_barrier()
    assert len(seen) == 1
    np.testing.assert_allclose(out["b"], params()["b"] + 1 + FEATURES * HIDDEN * 2 + FEATURES, rtol=1e-5)


def test_devices_that_do_not_reach_the_host_are_an_error(monkeypatch):
    monkeypatch.setattr(host_state, "KIND", "a kind that no device has")
    with sharding.mesh(data=8):
        tx = zero.shard(optax.adamw(1e-2), offload="host")
        with pytest.raises(ShardingError, match=r"(?s)memory kinds device, pinned_host.*required.*offload=None"):
            tx.init(params())


def test_errors():
    with pytest.raises(ShardingError, match="'host' or None"):
        zero.shard(optax.adamw(1e-2), offload="hots")
    with pytest.raises(ShardingError, match="zero.DiskOptimizer"):
        zero.shard(optax.adamw(1e-2), offload="disk")
    for delay_after in (-1, 1.5, True):
        with pytest.raises(ShardingError, match="at least 0, or None"):
            zero.shard(optax.adamw(1e-2), delay_after=delay_after)


def test_host_bytes_are_reported_before_the_run():
    with sharding.mesh(MESHES[0]):
        tx = zero.shard(optax.adamw(1e-2), offload="host", master=True)
        state = params(), sharding.jit(tx.init).eval_shape(params())
        batch = jax.ShapeDtypeStruct((SAMPLES, FEATURES), jnp.float32)
        step = sharding.jit(step_of(tx), donate_argnums=0)
        report = step.complete(state, batch, batch).memory()
    num = sum(leaf.size for leaf in jax.tree.leaves(params()))
    assert report.host.argument_bytes == 3 * 4 * num // 2 and report.host.total_bytes == report.host.argument_bytes


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("delay_after", [None, 0, 5])
def test_compiled_ahead_of_time_for_tpus(delay_after):
    """Host bytes are those predicted, and the device holds two groups of the state beside a step without it."""
    features, layers, samples = 1024, 16, 64

    def shapes():
        return {f"w{k}": jax.ShapeDtypeStruct((features, features), jnp.bfloat16) for k in range(layers)}

    def loss(params, x):
        for weights in params.values():
            x = jnp.tanh(x @ weights)
        return jnp.square(x.astype(jnp.float32)).mean()

    def compiled(**options):
        tx = zero.shard(OPTIMIZERS["clipped"](), stage=2, master=True, **options)

        def step(state, x):
            own, inner = state
            value, gradients = jax.value_and_grad(loss)(own, x)
            return tx.apply(gradients, inner, own), value

        step = sharding.jit(step, donate_argnums=0, in_shardings=(None, P("data")))
        state = shapes(), sharding.jit(tx.init).eval_shape(shapes())
        args = state, jax.ShapeDtypeStruct((samples, features), jnp.bfloat16)
        found = step.lower(*args).compile()
        assert "HostExecute" not in found.as_text()
        return step.complete(*args).memory(), found.memory_analysis()

    with sharding.mesh(data=2, tensor=4, devices=compile_only("v5p:2x2x2")):
        _, plain = compiled()
        report, found = compiled(offload="host", delay_after=delay_after)
    assert report.host.argument_bytes == found.host_argument_size_in_bytes > 0
    assert report.host.result_bytes == found.host_output_size_in_bytes - found.host_alias_size_in_bytes == 0
    assert report.host.temporary_bytes == found.host_temp_size_in_bytes == 0
    array = features * features * 4 // 2
    groups = 2 * (3 * array + (array // 2 if delay_after is not None else 0))
    assert found.argument_size_in_bytes < plain.argument_size_in_bytes - 3 * layers * array + 1024
    assert found.temp_size_in_bytes < plain.temp_size_in_bytes + 1.5 * groups
