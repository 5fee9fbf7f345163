"""`remat.fit`: predicted within every budget and no slower with a larger one; errors name what would do."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name as name
from support import remat_programs
from support.peak_memory import floats
from support.remat_programs import PROGRAMS, X, arrays_of, attention, auto, groups, mlp, scanned, scheduled, two_devices

import sharding
from sharding import P, ShardingError, remat
from sharding.display.units import bytes_text
from sharding.remat.budget_search import Cost, Search

fitted = functools.partial(remat_programs.fitted, peak="predicted")


def within_each_budget(fun, args, **options):
    """The programs of five budgets, from the least to more than enough."""
    free = fitted(fun, args, 1e12, **options)
    least, most = free.tradeoffs[0].peak_bytes, free.tradeoffs[-1].peak_bytes
    found = []
    for budget in np.linspace(least, most, 5).round().tolist():
        with two_devices():
            found.append(free.within(budget, peak="predicted"))
    for one in found:
        assert one.peak_bytes <= one.memory_bytes
    for smaller, larger in itertools.pairwise(found):
        assert larger.cost.seconds <= smaller.cost.seconds
        assert larger.tradeoffs == smaller.tradeoffs
    with two_devices(), pytest.raises(ShardingError, match=rf"memory_bytes={least}"):
        free.within(least - 1, peak="predicted")
    again = fitted(fun, args, found[2].memory_bytes, **options)
    assert (again.cost, again.policies) == (found[2].cost, found[2].policies)
    return found


def test_within_each_budget():
    found = within_each_budget(mlp, PROGRAMS[mlp])
    assert len({one.peak_bytes for one in found}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("fun", PROGRAMS, ids=lambda fun: fun.__name__)
def test_within_each_budget_and_the_same_numbers(fun):
    args = PROGRAMS[fun]
    found = within_each_budget(fun, args)
    arrays = arrays_of(args)
    want = jax.value_and_grad(fun)(*arrays)
    for one in (found[0], found[2], found[-1]):
        with two_devices():
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-4), one.step(*arrays), want)


def test_a_prediction_says_how_far_the_compiled_peak_may_be():
    found = fitted(mlp, PROGRAMS[mlp], 1e12)
    low, high = found.range_bytes
    assert low < found.peak_bytes < high
    assert f"compiled, nine of ten such programs take {bytes_text(low)} to {bytes_text(high)}" in str(found)


def test_trials_leave_no_programs_behind():
    with two_devices():
        step = sharding.jit(jax.value_and_grad(mlp), in_shardings=(None, P("data")))
        found = remat.fit(step, *PROGRAMS[mlp], memory_bytes=1e12, peak="predicted")
        assert step._cache_size() == 0
        found.step.complete(*PROGRAMS[mlp])
        assert step._cache_size() == 1


def test_arguments_on_the_host_are_no_offloaded_values():
    on_host = jax.memory.Space.Host

    def loss(ws, x):
        return scanned(jax.device_put(ws, jax.memory.Space.Device), x)

    with sharding.mesh(data=4, devices="v5p:2x2x1"):
        step = sharding.jit(lambda ws, x: jax.device_put(jax.grad(loss)(ws, x), on_host))
        found = remat.fit(step, *PROGRAMS[scanned], memory_bytes=1e12, host_memory_bytes=0)
    assert found.cost.host_bytes > 0 and not found.policy.offloaded


def test_the_policy_and_the_step_are_one_program():
    args = PROGRAMS[mlp]
    free = fitted(mlp, args, 1e12)
    found = fitted(mlp, args, free.tradeoffs[-2].peak_bytes)
    layer = jax.checkpoint(lambda w, x: jnp.tanh(name(jnp.sin(x), "sin") @ w), policy=found.policy)

    def by_hand(ws, x):
        return jnp.sum(functools.reduce(lambda x, w: layer(w, x), ws, x) ** 2)

    with two_devices():
        step = sharding.jit(jax.value_and_grad(by_hand), in_shardings=(None, P("data")))
        assert step.complete(*args).memory().peak_bytes == found.peak_bytes
        assert found.step.complete(*args).memory().peak_bytes == found.peak_bytes
        arrays = arrays_of(args)
        jax.tree.map(np.testing.assert_array_equal, step(*arrays), found.step(*arrays))


def test_what_is_kept_is_said_by_line():
    free = fitted(scanned, PROGRAMS[scanned], 1e12)
    assert free.values[0].action == "keep"
    found = fitted(scanned, PROGRAMS[scanned], free.tradeoffs[0].peak_bytes)
    (value,) = found.values
    assert (value.name, value.action, value.num_bytes) == ("up", "recompute", 4 * 256 * 32 * 4)
    assert value.flops == 4 * 2 * 256 * 32 * 32
    assert "remat_programs.py" in value.source
    assert "recompute" in str(found)
    assert str(found.policy) == "keeps nothing"


def test_snapshots_of_a_scan_are_chosen():
    args = PROGRAMS[scheduled]
    free = fitted(scheduled, args, 1e12)
    assert free.values[0].name == "scan of 12 steps" and free.values[0].action == "keep"
    found = fitted(scheduled, args, free.tradeoffs[0].peak_bytes)
    assert found.values[0].action == f"{found.policy.snapshots[0][1]} snapshots"
    schedule = found.policy.schedule(12)

    def by_hand(ws, x):
        return jnp.sum(remat.scan(lambda x, w: (jnp.tanh(jnp.sin(x) @ w), None), x, ws, schedule=schedule)[0])

    arrays = arrays_of(args)
    with two_devices():
        step = sharding.jit(jax.value_and_grad(by_hand), in_shardings=(None, P("data")))
        assert step.complete(*args).memory().peak_bytes == found.peak_bytes < free.peak_bytes
        jax.tree.map(np.testing.assert_array_equal, step(*arrays), found.step(*arrays))


def test_groups_share_a_budget():
    args = PROGRAMS[groups]
    tradeoffs = fitted(groups, args, 1e12).tradeoffs
    found = fitted(groups, args, (tradeoffs[0].peak_bytes + tradeoffs[1].peak_bytes) // 2)
    actions = {key: str(policy) for key, policy in found.policies.items()}
    assert len(actions) == 4
    assert len({*actions.values()}) == 2
    with pytest.raises(ShardingError, match=r"\.policies\[group\]"):
        _ = found.policy
    assert tradeoffs[0].peak_bytes < found.peak_bytes <= found.memory_bytes


def test_values_are_offloaded_where_the_host_has_room():
    def loss(ws, x):
        layer = auto(lambda w, x: jnp.tanh(name(functools.reduce(jnp.matmul, w[:7], x), "up")) @ w[7])
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0])

    args = jax.ShapeDtypeStruct((4, 8, 8192, 8192), "bfloat16"), jax.ShapeDtypeStruct((65536, 8192), "bfloat16")
    with sharding.mesh(data=4, devices="v5p:2x2x1"):
        jitted = sharding.jit(jax.grad(loss), in_shardings=(None, P("data")))
        free = remat.fit(jitted, *args, memory_bytes=1e12, names=["up"])
        offloading = [cost for cost in free.tradeoffs if cost.host_bytes]
        assert offloading
        found = remat.fit(jitted, *args, memory_bytes=offloading[-1].peak_bytes, names=["up"])
        assert found.policy.offloaded == {("name", "up")}
        assert found.values[0].action == "offload"
        assert found.step.complete(*args).memory().host.temporary_bytes == found.values[0].num_bytes
        at_home = remat.fit(jitted, *args, memory_bytes=1e12, names=["up"], host_memory_bytes=0)
        assert not any(cost.host_bytes for cost in at_home.tradeoffs)


def test_only_the_given_names():
    found = fitted(attention, PROGRAMS[attention], 1e12, names=["out"])
    assert [value.name for value in found.values] == ["out"]
    with pytest.raises(ShardingError, match=r"names are out, qkv(.|\n)*did you mean 'qkv'"):
        fitted(attention, PROGRAMS[attention], 1e12, names=["qk"])


@pytest.mark.parametrize("memory_bytes", [0, -1, float("nan"), float("inf"), True, "16GB"])
def test_a_budget_is_a_number_of_bytes(memory_bytes):
    with pytest.raises(ShardingError, match="bytes per device, above 0"):
        fitted(mlp, PROGRAMS[mlp], memory_bytes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peak": "compield"}, "'auto' or 'predicted' or 'compiled'"),
        ({"names": "sin"}, r"names=\['sin'\]"),
        ({"host_memory_bytes": -1}, "at least 0, or None"),
        ({"host_memory_bytes": float("nan")}, "at least 0, or None"),
    ],
    ids=str,
)
def test_options_that_are_none(options, message):
    with pytest.raises(ShardingError, match=message):
        fitted(mlp, PROGRAMS[mlp], 1e12, **options)


def test_a_budget_that_nothing_meets():
    with pytest.raises(ShardingError, match=r"(?s)at least .*largest: .*remat_programs.py.*fix: +memory_bytes=\d+"):
        fitted(scanned, PROGRAMS[scanned], 1000)


def test_schedules_of_the_users_own_are_not_chosen():
    def step(schedule):
        def loss(ws, x):
            return jnp.sum(remat.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws, schedule=schedule)[0])

        return loss, (floats(12, 32, 32), X), 1e9

    disk, host = (remat.disk_revolve(12, 3, write_cost=1, read_cost=1, place=place) for place in ("disk", "host"))
    with pytest.raises(ShardingError, match=r"(?s)snapshots on disk.*remat.fit\(..., memory_bytes=\) chooses"):
        fitted(*step(disk))
    with pytest.raises(ShardingError, match=r"remat.scan\(..., schedule=remat.auto\)"):
        fitted(*step(host))
    assert fitted(*step(remat.auto)).values[0].name == "scan of 12 steps"


def test_a_step_without_blocks_to_choose():
    with pytest.raises(ShardingError, match=r"jax.checkpoint\(block, policy=remat.auto\)"):
        fitted(lambda w, x: jnp.sum(x @ w), (floats(32, 32), X), 1e9)
    with pytest.raises(ShardingError, match=r"remat.fit\(sharding.jit\(step\)"):
        remat.fit(jax.grad(mlp), *PROGRAMS[mlp], memory_bytes=1e9)


def test_outside_of_fit_nothing_is_kept():
    def saved(policy):
        run = jax.checkpoint(lambda x: jnp.sin(name(jnp.sin(x), "sin")), policy=policy)
        return str(jax.make_jaxpr(jax.grad(run))(1.0))

    assert saved(remat.auto) == saved(None).replace("policy=None", f"policy={remat.auto!r}")


@pytest.mark.parametrize("seed", range(8))
def test_the_search_finds_the_best_programs_of_independent_values(seed):
    draw = np.random.default_rng(seed)
    sizes, times = draw.integers(1, 100, 8), draw.integers(1, 100, 8)

    def price(options):
        held = [option == "keep" for option in options]
        return Cost(peak_bytes=int(sizes @ held), seconds=float(times @ ~np.array(held)), flops=0.0)

    found = Search([("keep", "recompute")] * 8, price).run()
    by_ratio = sorted(range(8), key=lambda k: times[k] / sizes[k])
    for count in range(9):  # the best of the relaxed problem, of which each is a program
        kept = ["recompute" if k in by_ratio[:count] else "keep" for k in range(8)]
        assert price(kept) in [cost for _, cost in found]
