"""PipeDream's partition against exhaustive search over stages and replicas, and against published results."""

import functools
import itertools
import math
import random
from fractions import Fraction

import pytest

from sharding.errors import ShardingError
from sharding.pipeline.cutting import Level, pipedream

INSTANCE = {"activation_bytes": [8, 6, 4, 2, 1, 1], "weight_bytes": [1, 2, 4, 8, 40, 60]}


def parts(total, count):
    """All compositions of `total` into `count` positive integers."""
    for cuts in itertools.combinations(range(1, total), count - 1):
        yield [end - begin for begin, end in itertools.pairwise([0, *cuts, total])]


def least_time(costs, activation_bytes, weight_bytes, levels):
    """The least time by exhaustive search over stages and replicas, from the top level down, in exact arithmetic."""

    def stage(begin, end, count, height):
        """One stage, replicated over `count` parts of a level."""
        within = stages(begin, end, height - 1)
        weights = sum(weight_bytes[begin:end])
        return max(within, Fraction(2 * (count - 1) * weights, levels[height][1])) / count

    @functools.cache
    def stages(begin, end, height):
        if height < 0:
            return Fraction(sum(costs[begin:end]))
        total, bandwidth = levels[height]
        times = []
        for number in range(1, min(end - begin, total) + 1):
            for sizes, counts in itertools.product(parts(end - begin, number), parts(total, number)):
                ends = [begin + end for end in itertools.accumulate(sizes)]
                slowest = [
                    stage(end - size, end, count, height) for size, end, count in zip(sizes, ends, counts, strict=True)
                ]
                transfers = [Fraction(2 * activation_bytes[end - 1], bandwidth) for end in ends[:-1]]
                times.append(max(slowest + transfers))
        return min(times)

    return stages(0, len(costs), len(levels) - 1)


def test_published_recursion():
    found = pipedream([4, 3, 2, 2, 1, 1], **INSTANCE, levels=[(4, 10)])
    assert (found.sizes, found.replicas) == ((4, 2), (3, 1))
    assert found.bottleneck == pytest.approx(11 / 3)
    assert found.layers == (range(4), range(4, 6))
    assert found.minibatches_in_flight == 2  # 4 workers, 3 of them with the first stage


def test_least_of_all_on_one_level():
    numbers = random.Random("one level")
    for _ in range(60):
        layers = numbers.randint(1, 6)
        costs, activations, weights = ([numbers.randint(0, 9) for _ in range(layers)] for _ in range(3))
        levels = [(numbers.randint(1, 5), numbers.randint(1, 9))]
        found = pipedream(costs, activation_bytes=activations, weight_bytes=weights, levels=levels)
        assert found.bottleneck == pytest.approx(float(least_time(costs, activations, weights, levels)))
        assert sum(found.sizes) == layers
        assert sum(found.replicas) == levels[0][0]


def test_least_of_all_on_several_levels():
    numbers = random.Random("levels")
    for _ in range(40):
        layers = numbers.randint(1, 6)
        costs, activations, weights = ([numbers.randint(0, 9) for _ in range(layers)] for _ in range(3))
        levels = [(numbers.randint(1, 3), numbers.randint(1, 20)) for _ in range(numbers.randint(2, 3))]
        found = pipedream(costs, activation_bytes=activations, weight_bytes=weights, levels=levels)
        assert found.bottleneck == pytest.approx(float(least_time(costs, activations, weights, levels)))
        assert sum(found.sizes) == layers
        assert sum(found.replicas) == math.prod(count for count, _ in levels)


def test_bottleneck_is_the_slowest_stage_or_transfer():
    """On one level the bottleneck follows from the stages directly."""
    numbers = random.Random("stages")
    for _ in range(40):
        layers, bandwidth = numbers.randint(1, 9), numbers.randint(1, 9)
        costs, activations, weights = ([numbers.randint(1, 9) for _ in range(layers)] for _ in range(3))
        found = pipedream(costs, activation_bytes=activations, weight_bytes=weights, levels=[Level(4, bandwidth)])
        stages = [
            max(sum(costs[i] for i in run), 2 * (m - 1) * sum(weights[i] for i in run) / bandwidth) / m
            for run, m in zip(found.layers, found.replicas, strict=True)
        ]
        transfers = [2 * activations[run.stop - 1] / bandwidth for run in found.layers[:-1]]
        assert found.bottleneck == pytest.approx(max(stages + transfers))


def test_equal_layers_where_weights_are_heavy():
    found = pipedream([1] * 8, activation_bytes=[0] * 8, weight_bytes=[1e6] * 8, levels=[(4, 1)])
    assert (found.sizes, found.replicas, found.bottleneck) == ((2, 2, 2, 2), (1, 1, 1, 1), 2)
    assert found.minibatches_in_flight == 4


def test_equal_layers_where_links_are_free():
    found = pipedream([1] * 8, activation_bytes=[1] * 8, weight_bytes=[1] * 8, levels=[(4, math.inf)])
    assert (found.sizes, found.replicas, found.bottleneck) == ((8,), (4,), 2)
    assert found.minibatches_in_flight == 1


def test_heavy_weights_at_the_end_are_not_replicated():
    """As in VGG-16: thirteen convolutions dominate the time, three dense layers the weights; 15 + 1 workers."""
    found = pipedream(
        [10] * 13 + [3, 2, 1],
        activation_bytes=[30] * 12 + [2] + [1] * 3,
        weight_bytes=[1] * 13 + [400, 60, 20],
        levels=[(16, 5)],
    )
    assert (found.sizes, found.replicas) == ((13, 3), (15, 1))
    assert found.bottleneck == pytest.approx(130 / 15)
    assert found.minibatches_in_flight == 2


def test_the_slow_level_is_crossed_once():
    """Two servers: gradients are all-reduced inside them over fast links, and activations cross between them."""
    found = pipedream(
        [4, 4, 4, 4], activation_bytes=[100, 2, 100, 0], weight_bytes=[50] * 4, levels=[Level(2, 200), Level(2, 1)]
    )
    assert (found.sizes, found.replicas, found.bottleneck) == ((2, 2), (2, 2), 4)


@pytest.mark.parametrize("faster", [1.5, 4, 100])
def test_faster_links_are_never_worse(faster):
    numbers = random.Random(str(faster))
    for _ in range(10):
        lists = [[numbers.randint(0, 9) for _ in range(6)] for _ in range(3)]
        slow, fast = (
            pipedream(lists[0], activation_bytes=lists[1], weight_bytes=lists[2], levels=[(2, 3 * x), (3, x)])
            for x in (1, faster)
        )
        assert fast.bottleneck <= slow.bottleneck


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"costs": []}, "no layers"),
        ({"costs": [1, 2]}, r"costs has 2 numbers\n +activation_bytes has 6 numbers[\s\S]*one number per layer"),
        ({"weight_bytes": [1, 1, 1, 1, 1, -1]}, r"weight_bytes\[5\]\)\n  found:    -1"),
        ({"levels": []}, "no levels"),
        ({"levels": [(4, 1), (0, 1)]}, r"levels\[1\]\n  found:    parts=0"),
        ({"levels": [(4, 0)]}, r"levels\[0\]\(bandwidth\)\n  found:    0\n  required: a positive number"),
    ],
)
def test_what_cannot_be_cut(change, words):
    arguments = {"costs": [4, 3, 2, 2, 1, 1], **INSTANCE, "levels": [(4, 10)], **change}
    with pytest.raises(ShardingError, match=words):
        pipedream(arguments.pop("costs"), **arguments)
