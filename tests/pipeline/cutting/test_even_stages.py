"""Even stages against exhaustive search."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import pipeline
from sharding.errors import ShardingError
from sharding.pipeline import schedules
from sharding.pipeline.cutting import cut


def all_partitions(costs, stages):
    """The stages' costs for every partition."""
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        yield [sum(costs[begin:end]) for begin, end in itertools.pairwise([0, *cuts, len(costs)])]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_most_even_of_all_partitions(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    found = cut(costs, stages=stages)
    ways = list(all_partitions(costs, stages))
    assert list(found.costs) in ways
    assert sorted(found.costs, reverse=True) == min(sorted(way, reverse=True) for way in ways)
    assert found.bottleneck == min(map(max, ways))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.data())
def test_stages_are_all_layers_in_order(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    found = cut(costs, stages=stages)
    assert len(found.sizes) == len(found.costs) == stages
    assert min(found.sizes) >= 1
    assert [layer for layers in found.layers for layer in layers] == list(range(len(costs)))
    assert found.costs == pytest.approx([sum(costs[layer] for layer in layers) for layers in found.layers])
    assert found == cut(list(costs), stages=stages)


@pytest.mark.parametrize("cost", [1, 0.1, 0.7, 1e9])
@pytest.mark.parametrize(("layers", "stages"), [(8, 4), (10, 4), (9, 4), (96, 16), (7, 7), (5, 1)])
def test_equal_layers(cost, layers, stages):
    """Equal stages stay equal with inexact sums, too; longer ones come first."""
    expected = [len(part) for part in np.array_split(range(layers), stages)]
    assert cut([cost] * layers, stages=stages).sizes == tuple(expected)


def test_public_name():
    assert pipeline.cut is cut
    assert pipeline.cut([1, 1, 2], stages=2).sizes == (2, 1)


def test_a_head_that_costs_four_layers():
    found = cut([1] * 12 + [4], stages=4)
    assert (found.sizes, found.costs, found.bottleneck) == ((4, 4, 4, 1), (4, 4, 4, 4), 4)
    assert found.layers == (range(4), range(4, 8), range(8, 12), range(12, 13))


def test_the_rest_is_even_too():
    """The layer of 9 is the bottleneck; the other stages are still even."""
    assert cut([9, 1, 1, 1, 1], stages=3).sizes == (1, 2, 2)


def test_the_schedule_takes_least_with_these_stages():
    costs = [3, 1, 4, 1, 5, 2]
    makespans = {
        tuple(way): schedules.gpipe(stages=3, microbatches=64)
        .simulate(forward=way, backward=[2 * time for time in way])
        .makespan
        for way in all_partitions(costs, 3)
    }
    assert makespans[cut(costs, stages=3).costs] == min(makespans.values())


@pytest.mark.parametrize(
    ("costs", "stages", "words"),
    [
        ([], 1, r"pipeline\.cut\(costs\)\n  found:    no layers"),
        ([1, 2], 3, r"stages=3\)\n  found:    2 layers[\s\S]*stages=2 or fewer"),
        ([1, 2], 0, "stages=0"),
        ([1, 2], 1.5, r"stages=1\.5"),
        ([1, -2, 3], 2, r"costs\[1\]\)\n  found:    -2\n  required: a finite non-negative number"),
        ([float("nan"), 1, float("inf")], 2, r"2 failures[\s\S]*costs\[0\][\s\S]*nan[\s\S]*costs\[2\][\s\S]*inf"),
        (["1"], 1, r"costs\[0\]\)\n  found:    '1'"),
    ],
)
def test_what_cannot_be_cut(costs, stages, words):
    with pytest.raises(ShardingError, match=words):
        cut(costs, stages=stages)
