"""`remat.sequence`: gradients of unequal layers, which run as often as the schedule says."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilers import COMPILERS, devices
from support.peak_memory import newest_jax_only

import sharding
from sharding import P, remat

WIDTHS = [8, 16, 4, 4, 12, 8, 2]
STEPS = len(WIDTHS)
MIXED = remat.sqrt(STEPS), remat.revolve(STEPS, 1), remat.revolve(STEPS, 3), remat.chen([4 * w for w in WIDTHS])


def weights():
    pairs = zip([8, *WIDTHS[:-1]], WIDTHS, strict=True)
    return [jax.random.normal(jax.random.key(i), pair) / pair[0] ** 0.5 for i, pair in enumerate(pairs)]


def functions(ws, runs=None):
    def step(i, x):
        if runs is not None:
            jax.debug.callback(lambda: runs.append(i))
        return {"x": jnp.tanh(x["x"] @ ws[i]), "count": x["count"] + 1}

    return [functools.partial(step, i) for i in range(STEPS)]


def gradients(schedule, runs=None):
    def loss(ws, x):
        steps = functions(ws, runs)
        compose = (lambda x: functools.reduce(lambda x, f: f(x), steps, x)) if schedule is None else None
        out = (compose or remat.sequence(steps, schedule=schedule))({"x": x, "count": jnp.int32(0)})
        return (out["x"] ** 2).sum() * out["count"]

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(weights(), jnp.linspace(-1, 1, 24).reshape(3, 8))


@pytest.mark.parametrize("schedule", MIXED, ids=lambda s: f"{s.name}{s.snapshots}")
def test_gradients_and_runs_of_each_step(schedule):
    runs = []
    found = gradients(schedule, runs)
    jax.block_until_ready(found)
    jax.effects_barrier()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, gradients(None))
    assert len(runs) == schedule.evaluations
    expected = Counter(range(STEPS)) if schedule.name == "revolve" else Counter()
    for action in schedule.actions:
        expected.update(range(action.start, action.stop) if isinstance(action, remat.Advance) else ())
        expected.update([action.step] if isinstance(action, remat.Record) else ())
    assert Counter(runs) == expected


def test_on_a_mesh_as_on_one_device():
    def loss(ws, x):
        x = {"x": sharding.annotate(x, P("data")), "count": jnp.int32(0)}
        return (remat.sequence(functions(ws), schedule=remat.revolve(STEPS, 2))(x)["x"] ** 2).sum()

    args = weights(), jnp.linspace(-1, 1, 64).reshape(8, 8)
    with sharding.mesh(data=4, tensor=2):
        found = sharding.jit(jax.grad(loss))(*args)
    plain = lambda ws, x: (functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x) ** 2).sum()  # noqa: E731
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, jax.jit(jax.grad(plain))(*args)
    )


@newest_jax_only
@pytest.mark.parametrize(("backend", "described"), COMPILERS.values(), ids=COMPILERS)
def test_compiled_memory_falls_as_the_schedule_says(backend, described):
    steps, rows, size = 24, 16384, 128
    device = jax.sharding.SingleDeviceSharding(devices(described)[0])
    args = [jax.ShapeDtypeStruct(s, "float32", sharding=device) for s in ((steps, size, size), (rows, size))]

    def states(snapshots):
        def loss(ws, x):
            layers = [lambda x, w=ws[i]: x + jnp.tanh(x @ w) for i in range(steps)]
            return (remat.sequence(layers, schedule=remat.revolve(steps, snapshots))(x) ** 2).sum()

        compiled = jax.jit(jax.grad(loss)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * rows * size)

    few, many = states(8), states(20)
    assert many - few == pytest.approx(12, rel=0.1)


def test_other_number_of_functions():
    with pytest.raises(sharding.ShardingError, match=r"remat\.sequence\(schedule\)[\s\S]*remat\.sqrt\(3\)"):
        remat.sequence([jnp.sin] * 3, schedule=remat.sqrt(4))
