"""Stages on devices that differ, against all stages and orders; and what a change of the cluster moves."""

import itertools
import math
import random

import pytest

from sharding.errors import ShardingError
from sharding.pipeline.cutting import Allocation, Cluster, ClusterDevice, allocate

FOUR = {"work": [2, 2, 2, 2], "activation_bytes": [1] * 4, "state_bytes": [10] * 4}


def random_model(seed):
    numbers = random.Random(f"cluster {seed}")
    layers, count = numbers.randint(1, 5), numbers.randint(1, 3)
    names = "abc"[:count]
    devices = tuple(ClusterDevice(name, numbers.randint(1, 3), numbers.choice([math.inf, 15, 30])) for name in names)
    links = {pair: numbers.randint(1, 4) for pair in itertools.combinations(names, 2) if numbers.random() < 0.5}
    model = {
        "work": [numbers.randint(1, 9) for _ in range(layers)],
        "activation_bytes": [numbers.randint(0, 5) for _ in range(layers)],
        "state_bytes": [numbers.randint(1, 9) for _ in range(layers)],
    }
    before = None
    if numbers.random() < 0.7:
        own = sorted(numbers.choices(range(4), k=layers))
        groups = [(key, len(list(run))) for key, run in itertools.groupby(own)]
        before = Allocation(
            sizes=tuple(size for _, size in groups),
            devices=tuple("gabc"[key] for key, _ in groups),
            bottleneck=0.0,
            moved_bytes=0.0,
        )
    return model, Cluster(devices=devices, bandwidth=2, links=links), before


def outcomes(work, activation_bytes, state_bytes, cluster, before):
    """(bottleneck, moved bytes) of all stages and orders that fit."""
    layers = len(work)
    for count in range(1, min(layers, len(cluster.devices)) + 1):
        for order in itertools.permutations(cluster.devices, count):
            for cuts in itertools.combinations(range(1, layers), count - 1):
                runs = [range(*pair) for pair in itertools.pairwise([0, *cuts, layers])]
                pairs = list(zip(runs, order, strict=True))
                if any(sum(state_bytes[i] for i in run) > device.memory_bytes for run, device in pairs):
                    continue
                times = [sum(work[i] for i in run) / device.speed for run, device in pairs]
                for (run, a), (_, b) in itertools.pairwise(pairs):
                    times.append(2 * activation_bytes[run[-1]] / cluster.between(a.name, b.name))
                moved = 0
                if before:
                    moved = sum(state_bytes[i] for run, d in pairs for i in run if before.by_layer[i] != d.name)
                yield max(times), moved


@pytest.mark.parametrize("seed", range(40))
def test_least_of_all(seed):
    model, cluster, before = random_model(seed)
    found = list(outcomes(**model, cluster=cluster, before=before))
    if not found:
        with pytest.raises(ShardingError, match="consecutive layers"):
            allocate(**model, cluster=cluster, before=before)
        return
    best = min(time for time, _ in found)
    for tolerance in (0.0, 0.5):
        plan = allocate(**model, cluster=cluster, before=before, tolerance=tolerance)
        assert best <= plan.bottleneck <= best * (1 + tolerance)
        assert plan.moved_bytes == min(moved for time, moved in found if time <= best * (1 + tolerance))
        assert (plan.bottleneck, plan.moved_bytes) in found
        assert sum(plan.sizes) == len(model["work"])
        assert len(set(plan.devices)) == len(plan.devices)


def test_fast_devices_get_more_layers():
    cluster = Cluster(devices=(ClusterDevice("slow", 1), ClusterDevice("fast", 3)), bandwidth=math.inf)
    plan = allocate(**FOUR, cluster=cluster)
    assert dict(zip(plan.devices, plan.sizes, strict=True)) == {"slow": 1, "fast": 3}


def test_an_unchanged_cluster_moves_nothing():
    cluster = Cluster(devices=tuple(ClusterDevice(name, 1) for name in "abcd"), bandwidth=10)
    plan = allocate(**FOUR, cluster=cluster)
    again = allocate(**FOUR, cluster=cluster, before=plan)
    assert again.by_layer == plan.by_layer
    assert again.moved_bytes == 0


def test_a_slow_link_is_avoided():
    devices = tuple(ClusterDevice(name, 1) for name in "abc")
    cluster = Cluster(devices=devices, bandwidth=10, links={("a", "b"): 0.01})
    order = allocate(work=[1] * 3, activation_bytes=[1] * 3, state_bytes=[1] * 3, cluster=cluster).devices
    assert len(order) == 3
    assert order[1] == "c"


def test_tolerance_keeps_layers_where_they_are():
    old = Cluster(devices=(ClusterDevice("a", 1), ClusterDevice("b", 1)), bandwidth=10)
    plan = allocate(**FOUR, cluster=old)
    new = Cluster(devices=(*old.devices, ClusterDevice("c", 1)), bandwidth=10)
    assert allocate(**FOUR, cluster=new, before=plan).moved_bytes == 0  # three devices are as slow as two
    faster = Cluster(devices=(ClusterDevice("a", 1), ClusterDevice("b", 3)), bandwidth=10)
    assert allocate(**FOUR, cluster=faster, before=plan).moved_bytes == 10
    assert allocate(**FOUR, cluster=faster, before=plan, tolerance=1.0).moved_bytes == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(devices=(), bandwidth=1), "0 devices"),
        (lambda: Cluster(devices=(ClusterDevice("a", 1),) * 2, bandwidth=1), "2 devices with 1 names"),
        (lambda: Cluster(devices=tuple(ClusterDevice(str(k), 1) for k in range(11)), bandwidth=1), "as one"),
        (lambda: Cluster(devices=(ClusterDevice("a", 0),), bandwidth=1), "a positive finite speed"),
        (lambda: Cluster(devices=(ClusterDevice("a", 1),), bandwidth=0), "positive number"),
        (lambda: Cluster(devices=(ClusterDevice("a", 1),), bandwidth=1, links={("a", "z"): 1}), "two devices of a"),
    ],
)
def test_bad_clusters(make, message):
    with pytest.raises(ShardingError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"work": []}, "no layers"),
        ({"state_bytes": [1]}, "one number per layer"),
        ({"tolerance": -1}, "0 or more"),
        ({"before": Allocation(sizes=(2,), devices=("a",), bottleneck=1, moved_bytes=0)}, "2 layers before, 4 now"),
        ({"state_bytes": [99] * 4}, "the largest layer with 99"),
    ],
)
def test_bad_requests(change, message):
    small = Cluster(devices=(ClusterDevice("a", 1, 50),), bandwidth=1)
    with pytest.raises(ShardingError, match=message):
        allocate(**{**FOUR, "cluster": small, **change})
