"""PipeDream's released calculation against all stages and replicas, and against its own results."""

import itertools
import math
import random

import pytest

from sharding.errors import ShardingError
from sharding.pipeline.cutting import pipedream, pipedream_released

SIX = {"activation_bytes": [8, 6, 4, 2, 1, 1], "weight_bytes": [1, 2, 4, 8, 40, 60]}


def parts(total, count):
    """All compositions of `total` into `count` positive integers."""
    for cuts in itertools.combinations(range(1, total), count - 1):
        yield [end - begin for begin, end in itertools.pairwise([0, *cuts, total])]


def least_time(costs, activation_bytes, weight_bytes, workers, bandwidth, compression, memory):
    """The least bottleneck of all stages and replicas on one level."""
    best, layers = math.inf, len(costs)
    for number in range(1, min(layers, workers) + 1):
        for sizes, counts in itertools.product(parts(layers, number), parts(workers, number)):
            ends = list(itertools.accumulate(sizes))
            times = []
            for at, (end, size, count) in enumerate(zip(ends, sizes, counts, strict=True)):
                own = range(end - size, end)
                weights = sum(weight_bytes[i] for i in own)
                times.append((sum(costs[i] for i in own) + 4 * (count - 1) * weights / (count * bandwidth)) / count)
                stash = math.ceil(sum(counts[at + 1 :]) / count) * (weights + sum(activation_bytes[i] for i in own))
                if stash > memory:
                    times.append(math.inf)
                if at and compression:
                    moved = [activation_bytes[end - size - 1], *([activation_bytes[end - 1]] if end < layers else [])]
                    times.append(2 * max(moved) / (count * bandwidth * compression))
            best = min(best, max(times))
    return best


@pytest.mark.parametrize("seed", range(30))
def test_least_of_all_on_one_level(seed):
    numbers = random.Random(f"released {seed}")
    layers, workers, bandwidth = numbers.randint(1, 5), numbers.randint(1, 4), numbers.choice([1, 5, 10])
    lists = [[numbers.randint(0, most) for _ in range(layers)] for most in (9, 9, 30)]
    compression, memory = numbers.choice([None, 1, 2]), numbers.choice([math.inf, 30, 60])
    best = least_time(*lists, workers, bandwidth, compression, memory)
    costs, activations, weights = lists
    options = {
        "activation_bytes": activations,
        "weight_bytes": weights,
        "levels": [(workers, bandwidth)],
        "activation_compression": compression,
        "memory_bytes": memory,
    }
    assert pipedream_released(costs, **options).bottleneck == pytest.approx(best)


def test_results_of_the_released_program():
    # Printed by its `compute_partitioning` for these numbers.
    costs = [4, 3, 2, 2, 1, 1]
    for compression in (None, 1):
        found = pipedream_released(costs, **SIX, levels=[(4, 10)], activation_compression=compression)
        assert (found.bottleneck, found.sizes, found.replicas) == (4, (3, 3), (3, 1))
    two = pipedream_released(costs, **SIX, levels=[(2, 10), (2, 5)], activation_compression=1)
    assert two.bottleneck == 4
    # The paper's recursion takes the larger of compute and synchronisation instead of their sum.
    assert pipedream(costs, **SIX, levels=[(4, 10)]).bottleneck < 4


def test_one_worker_has_nothing_to_add():
    costs = [3, 1, 4]
    found = pipedream_released(costs, activation_bytes=[1] * 3, weight_bytes=[9] * 3, levels=[(1, 1), (1, 1)])
    assert (found.sizes, found.replicas, found.bottleneck) == ((3,), (1,), 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": []}, "no levels"),
        ({"weight_bytes": [1]}, "one number per layer"),
        ({"activation_compression": 0}, "a positive number, or None"),
    ],
)
def test_bad_requests(change, message):
    with pytest.raises(ShardingError, match=message):
        pipedream_released([1] * 6, **{**SIX, "levels": [(4, 10)], **change})
