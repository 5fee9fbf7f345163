"""`remat.scan`: gradients as of `jax.lax.scan`, and the forward steps and snapshots of its schedule, exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilers import COMPILERS, devices
from support.peak_memory import floats, newest_jax_only, peak_of

import sharding
from sharding import P, compat, remat
from sharding.remat import Advance, Backward, Free, Record, Restore, Snapshot
from sharding.remat.blocks import Block, actions

STEPS = 11
SCHEDULES = [
    remat.sqrt(STEPS),
    remat.chen([1] * STEPS, 0),
    remat.chen([1] * STEPS, 100),
    *(remat.revolve(STEPS, snapshots) for snapshots in (1, 2, 3, 5, STEPS - 1)),
]
IDS = [f"{s.name}{s.snapshots}" for s in SCHEDULES]


def layer(x, w):
    return x + jnp.tanh(x @ w), x[0]


def tail_loss(results):
    x, ys = results
    return (x**2).sum() + sum((y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum() for y in jax.tree.leaves(ys))


def weights(steps=STEPS, size=8):
    return jax.random.normal(jax.random.key(0), (steps, size, size)) / size**0.5


X = jnp.linspace(-1, 1, 32).reshape(4, 8)


def gradients(scan, body=layer, args=None):
    ws, x = (weights(), X) if args is None else args
    return jax.jit(jax.value_and_grad(lambda ws, x: tail_loss(scan(body, x, ws)), argnums=(0, 1)))(ws, x)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=IDS)
def test_gradients_are_bit_equal(schedule):
    assert_equal(gradients(functools.partial(remat.scan, schedule=schedule)), gradients(jax.lax.scan))


@pytest.mark.parametrize("schedule", [SCHEDULES[0], remat.revolve(STEPS, 2)], ids=["sqrt", "revolve"])
@pytest.mark.parametrize("used", ["carry", "ys", "part of the carry", "part of the ys"])
def test_gradients_where_not_all_results_are_used(used, schedule):
    """The others' cotangents are zeros of which there is no array."""

    def body(carry, w):
        x, total = carry
        x = x + jnp.tanh(x @ w) * jnp.tanh(total)[None]
        return (x, 0.9 * total + x.mean(0)), (x[0], total[:3])

    def gradients(scan):
        def loss(ws, x):
            (x, total), (rows, heads) = scan(body, (x, jnp.ones(8)), ws)
            parts = {
                "carry": (x, total),
                "ys": (rows, heads),
                "part of the carry": (total,),
                "part of the ys": (heads,),
            }
            return sum((part**2).sum() for part in parts[used])

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(weights(), X)

    found, expected = gradients(functools.partial(remat.scan, schedule=schedule)), gradients(jax.lax.scan)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    assert all(np.abs(leaf).max() > 0 for leaf in found[1])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=IDS)
def test_steps_run_as_often_as_the_schedule_says(schedule):
    runs = []

    def body(x, w):
        jax.debug.callback(lambda i: runs.append(int(i)), w[0, 0])
        return x + jnp.tanh(x @ w), None

    ws = weights().at[:, 0, 0].set(jnp.arange(STEPS))
    jax.block_until_ready(gradients(functools.partial(remat.scan, schedule=schedule), body, (ws, X)))
    jax.effects_barrier()
    expected = [0] * STEPS
    for action in schedule.actions:
        if isinstance(action, Advance):
            for step in range(action.start, action.stop):
                expected[step] += 1
        elif isinstance(action, Record):
            expected[action.step] += 1
    if schedule.name == "revolve":
        expected = [count + 1 for count in expected]  # each backward runs its own step
    assert [runs.count(step) for step in range(STEPS)] == expected
    assert len(runs) == schedule.evaluations


def snapshots_in(fun, shape, *args):
    """The most states of this shape in one buffer of the traced program, each written once per snapshot."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    eqns = [eqn for outer in compat.open_jaxpr(jaxpr).eqns for eqn in compat.equations(outer)]
    shapes = {tuple(v.aval.shape) for eqn in eqns for v in eqn.outvars}
    return max(s[0] for s in shapes if s[1:] == shape)


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5])
def test_program_holds_the_schedules_snapshots(snapshots):
    schedule = remat.revolve(STEPS, snapshots)
    body = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
    loss = lambda ws, x: tail_loss(remat.scan(body, x, ws, schedule=schedule))  # noqa: E731
    assert snapshots_in(jax.grad(loss), X.shape, weights(), X) == snapshots


def test_program_does_not_grow_with_steps_or_snapshots():
    def size(schedule):
        loss = lambda ws, x: tail_loss(remat.scan(layer, x, ws, schedule=schedule))  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss))(jax.ShapeDtypeStruct((schedule.steps, 8, 8), "float32"), X)
        return sum(1 for outer in compat.open_jaxpr(jaxpr).eqns for _ in compat.equations(outer))

    assert size(remat.revolve(2000, snapshots=50)) <= 1.1 * size(remat.revolve(20, snapshots=4))
    assert size(remat.sqrt(2500)) <= 1.1 * size(remat.sqrt(25))


def test_carries_of_all_kinds():
    """Keys, integers, results per step, arrays that the body closes over, some with gradients and some without."""

    def loss(ws, b, x, scan):
        mask = jnp.arange(8) % 3 != 0

        def body(carry, w):
            x, step, key = carry
            key, own = jax.random.split(key)
            h = jnp.tanh(x @ w["w"] + b[None] * step) * jax.random.bernoulli(own, 0.8, x.shape) * mask[None]
            return (x + h, step + 1, key), {"mean": h.mean(), "step": step}

        carry = x, jnp.int32(0), jax.random.key(1)
        (x, step, _), ys = scan(body, carry, {"w": ws})
        return (x**2).sum() * step + (ys["mean"] * ys["step"]).sum()

    def run(scan):
        args = weights(), jnp.linspace(0, 1, 8), X
        return jax.jit(jax.value_and_grad(functools.partial(loss, scan=scan), argnums=(0, 1, 2)))(*args)

    expected = run(jax.lax.scan)
    for schedule in (remat.revolve(STEPS, 3), remat.sqrt(STEPS)):
        found = run(functools.partial(remat.scan, schedule=schedule))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)


def test_arrays_without_gradients_get_no_buffers():
    """A data stream that is not differentiated costs no gradient of its size."""
    data = jax.ShapeDtypeStruct((STEPS, 1000), "float32")
    run = functools.partial(remat.scan, schedule=remat.revolve(STEPS, 2))
    loss = lambda x, data: run(lambda x, d: (jnp.sin(x + d.sum()), None), x, data)[0].sum()  # noqa: E731
    eqns = compat.open_jaxpr(jax.make_jaxpr(jax.grad(loss))(jnp.ones(3), data)).eqns
    shapes = [v.aval.shape for outer in eqns for eqn in compat.equations(outer) for v in eqn.outvars]
    assert (STEPS, 1000) not in shapes


def test_length_without_xs_and_weak_types():
    run = functools.partial(remat.scan, schedule=remat.revolve(5, 2))
    f = lambda scan, x: scan(lambda c, _: (c * jnp.float32(x), c), 1.0, None, 5)[0]  # noqa: E731
    assert jax.grad(functools.partial(f, run))(1.5) == jax.grad(functools.partial(f, jax.lax.scan))(1.5)


def test_under_vmap_and_hessian():
    run = functools.partial(remat.scan, schedule=remat.revolve(STEPS, 2))
    ws = weights(size=2)
    f = lambda scan, x: (scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0] ** 2).sum()  # noqa: E731
    x = jnp.linspace(0, 1, 2)
    batch = jnp.stack([x, 2 * x])
    for transform in (lambda g: jax.vmap(jax.grad(g)), lambda g: jax.vmap(jax.jacfwd(jax.grad(g)))):
        pair = [transform(functools.partial(f, scan))(batch) for scan in (run, jax.lax.scan)]
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-7)


def test_records_around_other_steps_are_unrolled():
    """A schedule that no loops replay: the record of step 0 is held while a block runs again."""
    whole = Block(0, 6, [0, Block(1, 4, [Block(1, 3, [1, 2]), 3]), 4, 5])
    schedule = remat.Schedule(name="mixed", steps=6, actions=list(actions(whole)))
    args = weights(6), X
    found = gradients(functools.partial(remat.scan, schedule=schedule), args=args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, gradients(jax.lax.scan, args=args)
    )


def test_states_that_are_dropped_and_computed_again():
    """Snapshots that come and go in any order, as no published schedule has them."""
    given = [Snapshot(0), Advance(0, 1), Snapshot(1), Advance(1, 3), Snapshot(3), Free(1), Backward(3), Restore(0)]
    given += [Advance(0, 1), Snapshot(1), Free(3), Advance(1, 2), Backward(2), Restore(1), Backward(1), Free(1)]
    schedule = remat.Schedule(name="mine", steps=4, actions=[*given, Restore(0), Backward(0), Free(0)])
    args = weights(4), X
    assert_equal(
        gradients(functools.partial(remat.scan, schedule=schedule), args=args), gradients(jax.lax.scan, args=args)
    )


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 4}, {"data": 8}], ids=str)
@pytest.mark.parametrize("schedule", [remat.revolve(6, 2), remat.sqrt(6)], ids=lambda s: s.name)
def test_on_a_mesh_as_on_one_device(sizes, schedule):
    def loss(ws, x, scan):
        def body(x, w):
            return x + jnp.tanh(x @ (sharding.annotate(w, P(None, "tensor")) if "tensor" in sizes else w)), None

        return tail_loss(scan(body, x, ws))

    grad = lambda scan: jax.value_and_grad(functools.partial(loss, scan=scan), argnums=(0, 1))  # noqa: E731
    args = weights(6), jnp.linspace(-1, 1, 64).reshape(8, 8)
    with sharding.mesh(sizes):
        step = sharding.jit(grad(functools.partial(remat.scan, schedule=schedule)), in_shardings=(None, P("data")))
        found = step(*args)
    sizes = {}
    expected = jax.jit(grad(jax.lax.scan))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)


SIZE, ROWS, LAYERS = 128, 16384, 40
STATE = 4 * SIZE * ROWS


def temporary_states(schedule, backend, described):
    """Temporary memory of loss and gradient, in states."""
    device = devices(described)[0]
    shapes = (LAYERS, SIZE, SIZE), (ROWS, SIZE)
    args = [jax.ShapeDtypeStruct(s, "float32", sharding=jax.sharding.SingleDeviceSharding(device)) for s in shapes]
    run = jax.lax.scan if schedule is None else functools.partial(remat.scan, schedule=schedule)
    body = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
    compiled = jax.jit(jax.grad(lambda ws, x: tail_loss(run(body, x, ws)))).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes / STATE


@newest_jax_only
@pytest.mark.parametrize(("backend", "described"), COMPILERS.values(), ids=COMPILERS)
def test_compiled_memory_falls_as_the_schedule_says(backend, described):
    base = temporary_states(remat.revolve(LAYERS, 4), backend, described)
    for snapshots in (8, 16, 24):
        found = temporary_states(remat.revolve(LAYERS, snapshots), backend, described)
        assert found - base == pytest.approx(snapshots - 4, rel=0.1)
    assert temporary_states(remat.sqrt(LAYERS), backend, described) < temporary_states(None, backend, described) / 2


@newest_jax_only
@pytest.mark.parametrize("schedule", [remat.sqrt(24), remat.revolve(24, 2), remat.revolve(24, 8)], ids=lambda s: s.name)
def test_memory_report_predicts_the_compiled_peak(schedule):
    body = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
    grad = jax.grad(lambda ws, x: (remat.scan(body, x, ws, schedule=schedule)[0] ** 2).sum())
    args = floats(24, SIZE, SIZE), floats(4096, SIZE)
    assert peak_of(grad, *args, sizes={"data": 8}, in_shardings=(None, P("data"))).ratio == pytest.approx(1, abs=0.1)


def test_other_number_of_steps():
    with pytest.raises(sharding.ShardingError, match=r"remat\.scan\(schedule\)[\s\S]*for 5 steps, and 11 steps"):
        remat.scan(layer, X, weights(), schedule=remat.revolve(5, 2))


def test_schedule_that_can_not_run():
    wrong = remat.Schedule(name="wrong", steps=STEPS, actions=[Snapshot(0), Backward(3)])
    with pytest.raises(sharding.ShardingError, match=r"wrong: action 1, backward 3"):
        remat.scan(layer, X, weights(), schedule=wrong)


def test_what_is_no_schedule():
    with pytest.raises(sharding.ShardingError, match=r"found: *'revolve'\s+required: a remat\.Schedule"):
        remat.scan(layer, X, weights(), schedule="revolve")
