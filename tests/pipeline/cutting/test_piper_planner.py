"""Piper's plans against all stages, degrees and options."""

import itertools
import math
import random

import pytest

from sharding.errors import ShardingError
from sharding.pipeline.cutting import LayerOption, piper
from sharding.pipeline.cutting.downsets import MOST_DOWNSETS

CHAIN = {"edges": [(0, 1), (1, 2), (2, 3)], "edge_bytes": [1, 1, 2], "microbatches": 8, "bandwidth": 10}


def published(layer, tensor):
    """A layer of the chain of four, plain and with recomputation."""
    seconds = [4, 4, 6, 2][layer] / tensor * (1 if tensor == 1 else 1.25)
    weights, kept, sync = [10, 20, 20, 40][layer] / tensor, [6, 6, 8, 2][layer] / tensor, 0.5 * (tensor > 1)
    plain = LayerOption(tensor, seconds, weights, kept, 2 * weights, sync, sync)
    return [plain, plain._replace(seconds=seconds * 4 / 3, activation_bytes=kept / 4)]


FOUR = [[option for tensor in (1, 2) for option in published(layer, tensor)] for layer in range(4)]


@pytest.mark.parametrize(
    ("devices", "memory", "time"), [(4, math.inf, 5.3), (4, 110, 5.3), (4, 100, 5.3), (8, math.inf, 3.4)]
)
def test_chain_of_four(devices, memory, time):
    found = piper(FOUR, **CHAIN, devices=devices, memory_bytes=memory)
    assert found.bottleneck == pytest.approx(time)
    assert found.devices <= devices


def random_model(seed):
    numbers = random.Random(f"piper {seed}")
    n = numbers.randint(1, 3)
    edges = [(u, v) for u in range(n) for v in range(u + 1, n) if numbers.random() < 0.7]
    options = [
        [
            LayerOption(
                tensor, *(numbers.randint(1, 9) for _ in range(4)), numbers.randint(0, 2), numbers.randint(0, 2)
            )
            for tensor in (1, 2)
            for _ in range(numbers.randint(1, 2))
        ]
        for _ in range(n)
    ]
    return options, {
        "edges": edges,
        "edge_bytes": [numbers.randint(0, 5) for _ in edges],
        "devices": numbers.randint(1, 5),
        "microbatches": numbers.choice([2, 4, 6]),
        "bandwidth": numbers.choice([1, 4]),
        "memory_bytes": numbers.choice([math.inf, 25, 40]),
    }


def stage_time(chosen, data, later, model):
    """The time of layers with an option each, {layer: option}; inf if they don't fit."""
    flight = math.ceil(later / data)
    if sum(o.activation_bytes * flight + o.fixed_bytes for o in chosen.values()) > model["memory_bytes"]:
        return math.inf
    total = 0.0
    for layer, option in chosen.items():
        moved = 0.0
        for (u, v), size in zip(model["edges"], model["edge_bytes"], strict=True):
            moved += 2 * (size + option.received_bytes) / data if v == layer and u not in chosen else 0.0
            moved += 2 * (size + option.sent_bytes) / data if u == layer and v not in chosen else 0.0
        moved += 4 * (data - 1) * option.weight_bytes / data / model["microbatches"]
        total += option.seconds / data + moved / model["bandwidth"]
    return total


def least(options, model):
    """The least bottleneck of all stages, degrees and options."""
    best, n = math.inf, len(options)
    for places in itertools.product(range(n), repeat=n):
        count = max(places) + 1
        if set(places) != set(range(count)) or any(places[u] > places[v] for u, v in model["edges"]):
            continue
        for picks in itertools.product(*options):
            groups = [{layer: picks[layer] for layer in range(n) if places[layer] == stage} for stage in range(count)]
            tensors = [{option.tensor for option in group.values()} for group in groups]
            if any(len(tensor) > 1 for tensor in tensors):
                continue
            for degrees in itertools.product(range(1, model["devices"] + 1), repeat=count):
                used = sum(d * tensor for d, (tensor,) in zip(degrees, tensors, strict=True))
                if used > model["devices"] or any(model["microbatches"] % d for d in degrees):
                    continue
                if sum(degrees) > model["microbatches"]:
                    continue
                later = [sum(degrees[stage:]) for stage in range(count)]
                slowest = max(stage_time(*of, model) for of in zip(groups, degrees, later, strict=True))
                best = min(best, slowest)
    return best


@pytest.mark.parametrize("seed", range(15))
def test_least_of_all(seed):
    options, model = random_model(seed)
    best = least(options, model)
    if math.isinf(best):
        with pytest.raises(ShardingError, match="no stages whose layers fit"):
            piper(options, **model)
        return
    found = piper(options, **model)
    assert found.bottleneck == pytest.approx(best)
    assert found.devices <= model["devices"]
    later = [sum(stage.data for stage in found.stages[at:]) for at in range(len(found.stages))]
    times = [
        stage_time({v: options[v][p] for v, p in zip(stage.layers, stage.options, strict=True)}, stage.data, s, model)
        for stage, s in zip(found.stages, later, strict=True)
    ]
    assert max(times) == pytest.approx(best)


def test_less_memory_is_never_faster():
    times = [piper(FOUR, **CHAIN, devices=4, memory_bytes=memory).bottleneck for memory in (60, 70, 85, 100, math.inf)]
    assert times == sorted(times, reverse=True)


def test_recomputation_only_where_plain_does_not_fit():
    free = piper(FOUR, **CHAIN, devices=4)
    assert all(option % 2 == 0 for stage in free.stages for option in stage.options)
    tight = piper(FOUR, **CHAIN, devices=4, memory_bytes=60)
    assert any(option % 2 for stage in tight.stages for option in stage.options)


def test_one_option_and_no_transfers_is_an_even_partition():
    plain = [[own[0]] for own in FOUR]
    one = piper(plain, **{**CHAIN, "edge_bytes": [0, 0, 0]}, devices=2)
    assert one.bottleneck == 8  # of 4, 4, 6, 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": []}, "no layers"),
        ({"options": [[], FOUR[1]]}, "a layer without"),
        ({"edge_bytes": [1]}, "1 numbers, 3 edges"),
        ({"edges": [(0, 1), (1, 2), (2, 0)]}, "a cycle"),
        ({"devices": 0}, "positive integers"),
        ({"bandwidth": 0}, "positive number"),
        ({"memory_bytes": 0}, "positive number of bytes"),
        ({"memory_bytes": 10}, "no stages whose layers fit"),
        ({"options": [[LayerOption(0, 1, 1, 1, 1)]] * 4}, r"options\[0\]\[0\]"),
    ],
)
def test_bad_requests(change, message):
    with pytest.raises(ShardingError, match=message):
        piper(**{"options": FOUR, **CHAIN, "devices": 4, **change})


def test_wide_graphs_are_refused():
    assert 2**20 > MOST_DOWNSETS
    with pytest.raises(ShardingError, match="downsets"):
        piper([FOUR[0]] * 20, edges=[], edge_bytes=[], devices=2, microbatches=2, bandwidth=1)
