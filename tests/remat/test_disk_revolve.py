"""Disk-Revolve: as cheap as a search over all ways to use both places, and as another implementation."""

import functools

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sharding
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


@pytest.mark.parametrize("costs", [(-1, 0), (0, float("nan")), (float("inf"), 0)])
def test_invalid_costs(costs):
    with pytest.raises(sharding.ShardingError, match=r"remat\.disk_revolve\((write|read)_cost\)"):
        remat.disk_revolve(5, 2, write_cost=costs[0], read_cost=costs[1])


def test_other_places_do_not_run():
    s = remat.disk_revolve(9, 1, write_cost=0, read_cost=0, place="host")
    with pytest.raises(sharding.ShardingError, match=r"snapshot 0 on host[\s\S]*all snapshots on the device"):
        remat.sequence([jnp.sin] * 9, schedule=s)
