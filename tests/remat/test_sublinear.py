"""Segments of the square root of the steps, and the budgeted walk."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sharding
from sharding import remat

sizes = st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any)


def starts(schedule):
    """The first step of each segment."""
    return [action.state for action in schedule.actions if isinstance(action, remat.Snapshot)]


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 10, 63, 64, 65, 1000])
def test_square_root(steps):
    s = remat.sqrt(steps)
    bounds = [*starts(s), steps]
    assert s.forwards == 2 * steps - (bounds[-1] - bounds[-2])
    assert s.evaluations == s.forwards
    assert s.snapshots <= 2 * math.ceil(math.sqrt(steps)) + 1
    s.check()


def test_published_example():
    s = remat.sqrt(64)
    assert s.snapshots == 16
    assert starts(s) == list(range(0, 64, 8))


def walk(layer_bytes, budget):
    """Algorithm 3: the first layer of each segment, the bytes stored, and those of the largest segment."""
    starts, stored, largest, open_bytes = [0], 0, 0, 0
    for layer, size in enumerate(layer_bytes):
        open_bytes += size
        largest = max(largest, open_bytes)
        if open_bytes > budget and layer + 1 < len(layer_bytes):
            starts, stored, open_bytes = [*starts, layer + 1], stored + size, 0
    return starts, stored, largest


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 60))
def test_given_budget_is_the_papers_walk(layer_bytes, budget):
    s = remat.chen(layer_bytes, budget)
    found, stored, largest = walk(layer_bytes, budget)
    assert starts(s) == found
    assert s.forwards == 2 * len(layer_bytes) - (len(layer_bytes) - found[-1])
    s.check()


@settings(max_examples=60, deadline=None)
@given(sizes)
@example([1, 5, 6, 0])  # whose range begins at a sum of sizes
def test_best_budget_of_the_papers_range(layer_bytes):
    square = sum(layer_bytes) * max(layer_bytes)
    budgets = range(math.isqrt(square // 2), math.isqrt(2 * square) + 1)  # bytes are whole
    best = min(sum(walk(layer_bytes, budget)[1:]) for budget in budgets)
    found = starts(remat.chen(layer_bytes))
    stored = sum(layer_bytes[start - 1] for start in found[1:])
    bounds = [*found, len(layer_bytes)]
    assert stored + max(sum(layer_bytes[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)) == best


def test_equal_layers_take_twice_the_square_root():
    assert remat.chen([1] * 64).snapshots == 16
    assert remat.chen([10**9] * 1000).snapshots <= 2 * 32 + 2


def test_many_unequal_layers():
    layer_bytes = [(17 * i * i) % 1009 + 1 for i in range(2000)]
    s = remat.chen(layer_bytes)
    assert s.peak_bytes < 3 * 2.1 * math.sqrt(sum(layer_bytes) * max(layer_bytes))


@pytest.mark.parametrize("layer_bytes", [[], [1, -1], [1.5], [float("nan")]])
def test_invalid_sizes(layer_bytes):
    with pytest.raises(sharding.ShardingError, match=r"remat\.Chain\(state_bytes\)"):
        remat.chen(layer_bytes)


def test_invalid_counts():
    with pytest.raises(sharding.ShardingError, match=r"remat\.sqrt\(steps\)[\s\S]*found: *0"):
        remat.sqrt(0)
    with pytest.raises(sharding.ShardingError, match=r"budget_bytes[\s\S]*at least 0"):
        remat.chen([1, 2], -1)
