"""Alpa's stages against all stages and submeshes."""

import itertools
import math
import random

import pytest

from sharding.errors import ShardingError
from sharding.pipeline.cutting import Submesh, alpa, alpa_planner, pipedream, submeshes

WORK = [3, 1, 4, 1, 5, 9]


def six_layers(own, mesh):
    """Ideal speed-up, less a quarter per layer for each doubling."""
    return sum(WORK[own.start : own.stop]) / mesh.size + 0.25 * len(own) * math.log2(mesh.size)


def least(seconds, layers, hosts, devices, microbatches, later=None):
    """The least time of a step of all stages and submeshes."""
    best = math.inf
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            runs = [range(*pair) for pair in itertools.pairwise([0, *cuts, layers])]
            for chosen in itertools.product(submeshes(hosts, devices), repeat=count):
                if sum(mesh.size for mesh in chosen) != hosts * devices:
                    continue
                pairs = list(zip(runs, chosen, strict=True))
                if later and any(later(*pair) < count - 1 - at for at, pair in enumerate(pairs)):
                    continue
                times = [seconds(*pair) for pair in pairs]
                best = min(best, sum(times) + (microbatches - 1) * max(times))
    return best


@pytest.mark.parametrize(
    ("microbatches", "total", "sizes"), [(1, 8.75, (6,)), (2, 17.5, (6,)), (4, 35.0, (6,)), (16, 125.5, (4, 2))]
)
def test_six_layers_on_four_devices(microbatches, total, sizes):
    plan = alpa(six_layers, layers=6, hosts=1, devices=4, microbatches=microbatches)
    assert plan.total == total
    assert plan.sizes == sizes
    assert sum(plan.seconds) + (microbatches - 1) * max(plan.seconds) == total


def random_model(seed):
    numbers = random.Random(f"alpa {seed}")
    layers, hosts, devices = numbers.randint(1, 5), numbers.randint(1, 3), numbers.choice([1, 2, 4])
    table = {}

    def draw(kind, values):
        return lambda own, mesh: table.setdefault((kind, own, mesh), numbers.choice(values))

    seconds = draw("seconds", [*range(1, 40), math.inf])
    return layers, hosts, devices, numbers.choice([1, 3, 16]), seconds, draw("later", [-1, 0, 1, 2, 9.5])


@pytest.mark.parametrize("seed", range(20))
def test_least_of_all(seed):
    layers, hosts, devices, microbatches, seconds, later = random_model(seed)
    for limit in (None, later):
        best = least(seconds, layers, hosts, devices, microbatches, limit)
        options = {"layers": layers, "hosts": hosts, "devices": devices, "microbatches": microbatches}
        if math.isinf(best):
            with pytest.raises(ShardingError, match="no stages"):
                alpa(seconds, **options, most_later_stages=limit)
            continue
        plan = alpa(seconds, **options, most_later_stages=limit)
        assert plan.total == pytest.approx(best)
        assert sorted(device for own in plan.devices for device in own) == list(range(hosts * devices))
        for mesh, own in zip(plan.submeshes, plan.devices, strict=True):
            assert len({device // devices for device in own}) == mesh.hosts
            assert len(own) == mesh.size


def test_slowest_stages_that_differ_by_rounding_are_tried_once(monkeypatch):
    def slowest_tried(noise):
        tried = []
        least_of = alpa_planner._Table.least
        with monkeypatch.context() as patch:
            patch.setattr(
                alpa_planner._Table, "least", lambda table, slowest: tried.append(slowest) or least_of(table, slowest)
            )

            def seconds(own, mesh):
                return len(own) * (0.5 + 0.5 / mesh.size) * (1 + noise * own.start)

            alpa(seconds, layers=6, hosts=1, devices=4, microbatches=1)
        return len(tried)

    assert slowest_tried(1e-9) < slowest_tried(1e-3)


def test_submeshes_are_parts_of_a_host_or_whole_hosts():
    assert submeshes(3, 4) == (Submesh(1, 1), Submesh(1, 2), Submesh(1, 4), Submesh(2, 4), Submesh(3, 4))
    with pytest.raises(ShardingError, match="a power of two"):
        submeshes(1, 6)


@pytest.mark.parametrize(("scale", "devices"), [(1, 2), (1, 4), (1, 8), (10, 2), (10, 4), (10, 8)])
def test_many_microbatches_and_data_parallelism_alone_are_pipedreams_bottleneck(scale, devices):
    weights = [1, 2, 4, 8, 40 * scale, 60 * scale]

    def replicated(own, mesh):
        sync = 2 * (mesh.size - 1) * sum(weights[own.start : own.stop]) / 10
        return max(sum(WORK[own.start : own.stop]), sync) / mesh.size

    plan = alpa(replicated, layers=6, hosts=1, devices=devices, microbatches=10**6)
    other = pipedream(WORK, activation_bytes=[0] * 6, weight_bytes=weights, levels=[(devices, 10)])
    # PipeDream's replicas may be any number: 5, 1, 1, 1 in the last case.
    if (scale, devices) == (10, 8):
        assert max(plan.seconds) >= other.bottleneck
    else:
        assert max(plan.seconds) == pytest.approx(other.bottleneck)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "positive integers"),
        ({"microbatches": 0}, "positive integers"),
        ({"devices": 3}, "a power of two"),
        ({"stage_seconds": lambda own, mesh: math.nan}, "a non-negative number, or inf"),
        ({"stage_seconds": lambda own, mesh: math.inf}, "no stages of finite time"),
        ({"most_later_stages": lambda own, mesh: -1}, "no stages of finite time"),
    ],
)
def test_bad_requests(options, message):
    with pytest.raises(ShardingError, match=message):
        alpa(**{"stage_seconds": six_layers, "layers": 6, "hosts": 1, "devices": 4, "microbatches": 4, **options})
