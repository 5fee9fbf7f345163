"""Disk-Revolve: as cheap as a search over all ways to use both places; its host snapshots run, offloaded."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.peak_memory import newest_jax_only

import sharding
from sharding import cost as costs
from sharding import remat
from sharding.remat import Restore, Snapshot


def cost(schedule, write, read):
    moved = [a for a in schedule.actions if isinstance(a, Restore | Snapshot) and a.place != "device"]
    return schedule.forwards + sum(write if isinstance(action, Snapshot) else read for action in moved)


def least(steps, snapshots, write, read):
    """The definition, by recursion over where the state before each part is stored."""

    @functools.cache
    def memory(length, slots):
        if length <= 1:
            return 0
        if slots == 1:
            return length * (length - 1) // 2
        return min(k + memory(length - k, slots - 1) + memory(k, slots) for k in range(1, length))

    @functools.cache
    def loaded(length):
        options = [j + memory(length - j, snapshots) + read + loaded(j) for j in range(1, length)]
        return min([memory(length, snapshots), *options])

    @functools.cache
    def whole(length):
        options = [write + j + whole(length - j) + read + loaded(j) for j in range(1, length)]
        return min([memory(length, snapshots), *options])

    return whole(steps)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
def test_cost_is_the_least(steps, snapshots, write, read):
    s = remat.disk_revolve(steps, snapshots, write_cost=write, read_cost=read)
    s.check()
    assert cost(s, write, read) == pytest.approx(least(steps, snapshots, write, read))
    assert most_on_device(s) <= snapshots


def most_on_device(schedule):
    held, most = set(), 0
    for action in schedule.actions:
        if isinstance(action, Snapshot | remat.Free) and action.place == "device":
            held ^= {action.state}
            most = max(most, len(held))
    return most


@pytest.mark.parametrize(("steps", "snapshots"), [(5, 1), (20, 2), (50, 3), (80, 6)])
def test_as_checkpoint_schedules(steps, snapshots):
    peer = pytest.importorskip("checkpoint_schedules")
    total = 0
    for action in peer.DiskRevolve(steps, snapshots, uf=1, ub=1, wd=2, rd=2):
        if isinstance(action, peer.Forward):
            total += action.n1 - action.n0
            total += 2 * (action.write_ics and action.storage == peer.StorageType.DISK)
        elif isinstance(action, peer.Copy | peer.Move):
            total += 2 * (action.from_storage == peer.StorageType.DISK)
        elif isinstance(action, peer.EndReverse):
            break
    s = remat.disk_revolve(steps, snapshots, write_cost=2, read_cost=2)
    assert cost(s, 2, 2) + steps == total


def test_free_transfers_store_everything_and_dear_ones_nothing():
    assert remat.disk_revolve(60, 2, write_cost=0, read_cost=0).forwards == 59
    assert remat.disk_revolve(60, 2, write_cost=10**6, read_cost=0).actions == remat.revolve(60, 2).actions


def test_thousands_of_steps():
    s = remat.disk_revolve(3000, 4, write_cost=5, read_cost=5)
    assert s.forwards < 3 * 3000 < remat.revolve(3000, 4).forwards / 3
    s.check()


@pytest.mark.parametrize("both", [(-1, 0), (0, float("nan")), (float("inf"), 0)])
def test_invalid_costs(both):
    with pytest.raises(sharding.ShardingError, match=r"remat\.disk_revolve\((write|read)_cost\)"):
        remat.disk_revolve(5, 2, write_cost=both[0], read_cost=both[1])


@pytest.mark.parametrize(("snapshots", "write", "read"), [(1, 0, 0), (1, 2, 2), (2, 1, 1)])
def test_snapshots_on_the_host_run(snapshots, write, read):
    """Offloaded, with scalars and integers in the state; steps run as often as the schedule says."""
    steps, runs = 9, []
    schedule = remat.disk_revolve(steps, snapshots, write_cost=write, read_cost=read, place="host")
    ws = jax.random.normal(jax.random.key(0), (steps, 8, 8)) / 3

    def step(number, state):
        jax.debug.callback(lambda: runs.append(number))
        return {"x": state["x"] + jnp.tanh(state["x"] @ ws[number]), "count": state["count"] + 1}

    def loss(x, schedule=schedule):
        functions = [functools.partial(step, number) for number in range(steps)]
        out = remat.sequence(functions, schedule=schedule)({"x": x, "count": jnp.int32(0)})
        return jnp.sum(out["x"] ** 2) * out["count"]

    x = jnp.linspace(-1, 1, 32).reshape(4, 8)
    found = jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(x))
    jax.effects_barrier()
    assert len(runs) == schedule.evaluations
    plain = functools.partial(loss, schedule=remat.revolve(steps, steps))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, jax.jit(jax.value_and_grad(plain))(x))
    moved = str(jax.make_jaxpr(jax.grad(loss))(x)).count("<host>")
    assert moved >= sum(isinstance(action, remat.Snapshot) and action.place == "host" for action in schedule.actions)


def test_a_scan_with_snapshots_on_the_host():
    schedule = remat.disk_revolve(6, 1, write_cost=1, read_cost=1, place="host")
    ws, x = jax.random.normal(jax.random.key(0), (6, 8, 8)) / 3, jnp.linspace(-1, 1, 32).reshape(4, 8)

    def gradient(scan):
        return jax.jit(jax.grad(lambda ws, x: jnp.sum(scan(lambda x, w: (jnp.tanh(x @ w), x[0]), x, ws)[0] ** 2)))(
            ws, x
        )

    found = gradient(functools.partial(remat.scan, schedule=schedule))
    np.testing.assert_allclose(found, gradient(jax.lax.scan), rtol=1e-4, atol=1e-6)


@newest_jax_only
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu")
def test_a_tpu_holds_them_on_the_host():
    steps, rows, size = 12, 16384, 128
    schedule = remat.disk_revolve(steps, 2, write_cost=1, read_cost=1, place="host")
    device = jax.sharding.SingleDeviceSharding(costs.compile_only("v5p:2x2x1")[0])
    args = [jax.ShapeDtypeStruct(s, "float32", sharding=device) for s in ((steps, size, size), (rows, size))]

    def loss(ws, x):
        layers = [lambda x, w=ws[i]: x + jnp.tanh(x @ w) for i in range(steps)]
        return (remat.sequence(layers, schedule=schedule)(x) ** 2).sum()

    memory = jax.jit(jax.grad(loss)).lower(*args).compile().memory_analysis()
    states = {a.state for a in schedule.actions if isinstance(a, remat.Snapshot) and a.place == "host"}
    assert len(states) - 1 <= memory.host_temp_size_in_bytes / (4 * rows * size) <= len(states)  # one may be the input


def test_snapshots_on_disk_do_not_run():
    s = remat.disk_revolve(9, 1, write_cost=0, read_cost=0)
    for_disk = r"snapshot 0 on disk[\s\S]*does not reach the disk[\s\S]*place=\"host\"[\s\S]*remat.auto, in a scan"
    with pytest.raises(sharding.ShardingError, match=for_disk):
        remat.sequence([jnp.sin] * 9, schedule=s)
