"""Revolve: both optima of the slow dynamic program, the published counts, and other implementations."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sharding
from sharding import remat
from sharding.remat.revolve import num_forwards

TABLE = {
    (1, 56): 1540,
    (2, 35): 161,
    (3, 35): 105,
    (4, 20): 39,
    (5, 56): 140,
    (6, 56): 132,
    (5, 100): 316,
    (10, 100): 222,
    (5, 1000): 6284,
    (20, 1000): 2747,
    (50, 1000): 1948,
}
"""(snapshots, steps) -> forward steps, of Griewank and Walther's formula."""


@functools.cache
def fewest(steps, snapshots):
    """The fewest forward steps, and with those the fewest snapshots written, by the definition."""
    if steps == 1:
        return 0, 0
    if snapshots == 1:
        return steps * (steps - 1) // 2, 0
    options = []
    for k in range(1, steps):
        right, left = fewest(steps - k, snapshots - 1), fewest(k, snapshots)
        options.append((k + right[0] + left[0], (steps - k > 1) + right[1] + left[1]))
    return min(options)


def written(schedule):
    return sum(isinstance(action, remat.Snapshot) for action in schedule.actions) - 1


def runs_of_steps(schedule):
    """How often each step runs forward, its backward included."""
    runs = [1] * schedule.steps
    for action in schedule.actions:
        if isinstance(action, remat.Advance):
            for step in range(action.start, action.stop):
                runs[step] += 1
    return runs


@pytest.mark.parametrize("snapshots", range(1, 8))
def test_optimal_as_the_dynamic_program(snapshots):
    for steps in range(1, 60):
        s = remat.revolve(steps, snapshots)
        assert (s.forwards, written(s)) == fewest(steps, snapshots), (steps, snapshots)
        assert s.snapshots == min(snapshots, max(steps - 1, 1))
        s.check()


@pytest.mark.parametrize("sizes", TABLE)
def test_published_counts(sizes):
    assert remat.revolve(sizes[1], sizes[0]).forwards == TABLE[sizes]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 40))
def test_closed_form_and_bound_at_any_size(steps, snapshots):
    snapshots = max(snapshots, 2)
    s = remat.revolve(steps, snapshots)
    repeats = next(r for r in range(steps) if math.comb(snapshots + r, r) >= steps)
    assert s.forwards == num_forwards(steps, snapshots)
    assert s.forwards == repeats * steps - (math.comb(snapshots + repeats, repeats - 1) if repeats else 0)
    assert s.snapshots <= snapshots
    assert max(runs_of_steps(s)) == repeats + 1
    assert s.evaluations == s.forwards + steps == sum(runs_of_steps(s))


def test_one_snapshot_and_as_many_as_steps():
    assert remat.revolve(3000, snapshots=1).forwards == 3000 * 2999 // 2
    assert remat.revolve(3000, snapshots=2999).forwards == 2999
    assert remat.revolve(3000, snapshots=10**6) == remat.revolve(3000, snapshots=2999)


@pytest.mark.parametrize("steps", [2, 3, 10, 64, 100, 1000])
def test_square_root_is_never_better_with_as_many_states(steps):
    root = remat.sqrt(steps)
    assert remat.revolve(steps, root.snapshots).forwards <= root.forwards


@pytest.mark.parametrize(("steps", "snapshots"), [(1, 1), (2, 5), (10, 3), (37, 4), (120, 6), (300, 1)])
def test_as_checkpoint_schedules(steps, snapshots):
    peer = pytest.importorskip("checkpoint_schedules")
    count = 0
    for action in peer.Revolve(steps, snapshots):
        if isinstance(action, peer.Forward):
            count += action.n1 - action.n0
        if isinstance(action, peer.EndReverse):
            break
    assert remat.revolve(steps, snapshots).evaluations == count


@pytest.mark.parametrize(("steps", "snapshots"), [(2, 5), (10, 3), (37, 4), (120, 6), (1000, 20)])
def test_as_pyrevolve(steps, snapshots):
    peer = pytest.importorskip("pyrevolve.crevolve")
    assert remat.revolve(steps, snapshots).forwards == peer.numforw(steps, snapshots)


@pytest.mark.parametrize(("steps", "snapshots"), [(0, 1), (3, 0), (2.5, 1), (-1, 2), (3, True)])
def test_invalid_counts(steps, snapshots):
    with pytest.raises(sharding.ShardingError, match=r"remat\.revolve\((steps|snapshots)\)[\s\S]*at least 1"):
        remat.revolve(steps, snapshots)


def test_counts_of_numpy():
    assert remat.revolve(np.int64(7), np.int32(2)) == remat.revolve(7, 2)
