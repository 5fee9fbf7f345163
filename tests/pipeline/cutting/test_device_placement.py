"""Placements of ops against all placements, by dynamic programming and by integer programs."""

import itertools
import math
import random

import pytest

from sharding.errors import ShardingError
from sharding.pipeline import cutting
from sharding.pipeline.cutting import OpGraph, place_ops, place_ops_by_program
from sharding.pipeline.cutting.downsets import downsets

EDGES = [(0, 1), (0, 2), (1, 3), (2, 4), (1, 4), (3, 5), (4, 5)]
SIX = OpGraph(seconds=[2, 3, 4, 2, 3, 2], transfer=[1, 0.5, 2, 0.5, 1, 0], num_bytes=[1, 1, 2, 1, 2, 1], edges=EDGES)


def random_graph(seed, most_ops=6):
    numbers = random.Random(f"placement {seed}")
    n = numbers.randint(1, most_ops)
    edges = [(u, v) for u in range(n) for v in range(u + 1, n) if numbers.random() < 0.4]
    names = numbers.sample(range(n), n)
    return OpGraph(
        seconds=[
            numbers.choice([*range(1, 9), math.inf]) if numbers.random() < 0.2 else numbers.randint(1, 9)
            for _ in range(n)
        ],
        transfer=[numbers.randint(0, 4) for _ in range(n)],
        num_bytes=[numbers.randint(1, 4) for _ in range(n)],
        host_seconds=[numbers.randint(5, 20) for _ in range(n)],
        edges=[(names[u], names[v]) for u, v in edges],
        together=[numbers.sample(range(n), 2)] if n > 2 and numbers.random() < 0.3 else [],
    )


def load(graph, ops, is_host):
    """A device's load, op by op."""
    if is_host:
        return sum(graph.host_seconds[op] for op in ops)
    received = {u for u, v in graph.edges if v in ops and u not in ops}
    sent = {u for u, v in graph.edges if u in ops and v not in ops}
    return sum(graph.seconds[op] for op in ops) + sum(graph.transfer[op] for op in [*received, *sent])


def is_contiguous(graph, ops):
    """Whether no path leaves the ops and comes back."""
    outside = {v for u, v in graph.edges if u in ops and v not in ops}
    while True:
        more = {v for u, v in graph.edges if u in outside} - outside
        if more & ops:
            return False
        if not more:
            return True
        outside |= more


def is_pipeline(graph, devices):
    """Whether the devices can be put in an order in which none reads from a later one."""
    pairs = {(devices[u], devices[v]) for u, v in graph.edges if devices[u] != devices[v]}
    left = set(devices)
    while left:
        first = {d for d in left if not any(v == d and u in left for u, v in pairs)}
        if not first:
            return False
        left -= first
    return True


def least(graph, accelerators, hosts, memory_bytes, kind):
    """The least bottleneck of all placements of a kind."""
    best = math.inf
    for devices in itertools.product(range(accelerators + hosts), repeat=graph.num_ops):
        sets = [{op for op, d in enumerate(devices) if d == device} for device in range(accelerators + hosts)]
        if any(sum(graph.num_bytes[op] for op in ops) > memory_bytes for ops in sets[:accelerators]):
            continue
        if any(len({devices[op] for op in group}) > 1 for group in graph.together):
            continue
        if kind == "pipeline" and not is_pipeline(graph, devices):
            continue
        if kind == "contiguous" and not all(is_contiguous(graph, ops) for ops in sets):
            continue
        best = min(best, max(load(graph, ops, device >= accelerators) for device, ops in enumerate(sets)))
    return best


def test_six_ops():
    found = place_ops(SIX, accelerators=2)
    assert found.bottleneck == 11
    assert found.devices == (0, 0, 1, 0, 1, 1)
    assert place_ops_by_program(SIX, accelerators=2).bottleneck == 11
    assert place_ops(SIX, accelerators=1).bottleneck == sum(SIX.seconds)


@pytest.mark.parametrize("seed", range(25))
def test_least_of_all(seed):
    graph = random_graph(seed)
    numbers = random.Random(seed)
    accelerators, hosts = numbers.randint(1, 3), numbers.randint(0, 1)
    memory = numbers.choice([math.inf, 6, 8])
    best = least(graph, accelerators, hosts, memory, "pipeline")
    options = {"accelerators": accelerators, "hosts": hosts, "memory_bytes": memory}
    if math.isinf(best):
        with pytest.raises(ShardingError, match="more accelerators"):
            place_ops(graph, **options)
        return
    found = place_ops(graph, **options)
    assert found.bottleneck == best
    assert is_pipeline(graph, found.devices)
    for device, total in enumerate(found.loads):
        ops = {op for op, d in enumerate(found.devices) if d == device}
        assert total == load(graph, ops, device >= accelerators)
        assert device >= accelerators or sum(graph.num_bytes[op] for op in ops) <= memory


@pytest.mark.parametrize("seed", range(12))
def test_programs_against_all(seed):
    graph = random_graph(seed, most_ops=5)
    options = {"accelerators": 2, "hosts": seed % 2, "memory_bytes": [math.inf, 9][seed % 2]}
    bests = [least(graph, *options.values(), kind) for kind in ("any", "contiguous", "pipeline")]
    assert bests == sorted(bests)
    for kind, best in zip(("any", "contiguous"), bests, strict=False):
        if math.isinf(best):
            with pytest.raises(ShardingError, match="more accelerators"):
                place_ops_by_program(graph, **options, sets=kind)
        else:
            assert place_ops_by_program(graph, **options, sets=kind).bottleneck == pytest.approx(best)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_numbers_of_downsets(count):
    chain = [(i, i + 1) for i in range(count - 1)]
    assert len(downsets("test", count, chain)) == count + 1
    assert len(downsets("test", count, [])) == 2**count
    assert len(downsets("test", 6, EDGES)) == 10


def test_many_parallel_ops_are_refused_and_chained():
    graph = OpGraph(seconds=[1] * 30, transfer=[0] * 30, edges=[])
    with pytest.raises(ShardingError, match="cutting.chained"):
        place_ops(graph, accelerators=2)
    chain = OpGraph(seconds=[1] * 30, transfer=[0] * 30, edges=cutting.chained(30, []))
    assert place_ops(chain, accelerators=3).bottleneck == 10


def test_ops_together_take_what_is_between_them():
    chain = [(0, 1), (1, 2), (2, 3)]
    graph = OpGraph(seconds=[1] * 4, transfer=[0] * 4, edges=chain, together=[(0, 2)])
    assert graph.classes() == [[0, 1, 2], [3]]
    assert place_ops(graph, accelerators=2).devices == (0, 0, 0, 1)
    assert place_ops_by_program(graph, accelerators=2, sets="any").bottleneck == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": [(0, 1), (1, 0)]}, "a cycle"),
        ({"edges": [(0, 2)]}, "two different ops below 2"),
        ({"edges": [(1, 1)]}, "two different ops below 2"),
        ({"transfer": [1]}, "1 numbers for 2 ops"),
        ({"seconds": [1, -1]}, r"seconds\[1\]"),
        ({"transfer": [1, math.inf]}, r"transfer\[1\]"),
        ({"seconds": []}, "no ops"),
        ({"together": [[0, 5]]}, "op 5"),
    ],
)
def test_bad_graphs(change, message):
    with pytest.raises(ShardingError, match=message):
        OpGraph(**{"seconds": [1, 2], "transfer": [1, 2], "edges": [(0, 1)], **change})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerators": 0}, "positive integers"),
        ({"accelerators": 2, "hosts": -1}, "0 or more"),
        ({"accelerators": 2, "sets": "some"}, "contiguous or any"),
        ({"accelerators": 2, "seconds": 0}, "positive number of seconds"),
        ({"accelerators": 2, "memory_bytes": 3}, "8 bytes of ops"),
    ],
)
def test_bad_requests(options, message):
    with pytest.raises(ShardingError, match=message):
        place_ops_by_program(SIX, **options)
