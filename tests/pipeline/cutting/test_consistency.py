"""What planners of different papers must agree on where their models are the same."""

import random

import pytest

from sharding.pipeline.cutting import (
    LayerOption,
    Machines,
    OpGraph,
    Submesh,
    alpa,
    cut,
    dapple,
    pipedream,
    pipedream_released,
    piper,
    place_ops,
    place_ops_by_program,
)

SEEDS = range(6)


def chain(seed):
    """Costs of layers, and the edges between them."""
    numbers = random.Random(f"consistency {seed}")
    layers = numbers.randint(3, 6)
    return [numbers.randint(1, 9) for _ in range(layers)], [(i, i + 1) for i in range(layers - 1)]


def straight(costs, workers):
    """The bottleneck with at most one worker per stage."""
    return min(cut(costs, stages=stages).bottleneck for stages in range(1, min(workers, len(costs)) + 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_without_replicas_and_transfers_all_are_even_stages(seed):
    costs, edges = chain(seed)
    graph = OpGraph(seconds=costs, transfer=[0] * len(costs), edges=edges)
    best = straight(costs, 3)
    assert place_ops(graph, accelerators=3).bottleneck == best
    assert place_ops_by_program(graph, accelerators=3).bottleneck == pytest.approx(best)
    one = {"activation_bytes": [0] * len(costs), "weight_bytes": [1e9] * len(costs), "levels": [(3, 1)]}
    for plan in (pipedream(costs, **one), pipedream_released(costs, **one)):
        if len(costs) >= 3:  # all workers are in use
            assert plan.bottleneck == best
    options = [[LayerOption(1, cost, 1e9, 0, 0)] for cost in costs]
    none = [0] * len(edges)
    assert piper(options, edges=edges, edge_bytes=none, devices=3, microbatches=4, bandwidth=1).bottleneck == best


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chain_has_the_same_placement_by_both_methods_and_replicas_only_help(seed):
    costs, edges = chain(seed)
    graph = OpGraph(seconds=costs, transfer=[1] * len(costs), edges=edges)
    contiguous = place_ops_by_program(graph, accelerators=3).bottleneck
    assert place_ops(graph, accelerators=3).bottleneck == pytest.approx(contiguous)
    free = pipedream(costs, activation_bytes=[0] * len(costs), weight_bytes=[0] * len(costs), levels=[(3, 1)])
    assert free.bottleneck <= contiguous + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_many_microbatches_make_piper_pipedream(seed):
    costs, edges = chain(seed)
    options = [[LayerOption(1, cost, 5, 0, 0)] for cost in costs]
    found = piper(options, edges=edges, edge_bytes=[0] * len(edges), devices=4, microbatches=12 * 10**9, bandwidth=1)
    other = pipedream(costs, activation_bytes=[0] * len(costs), weight_bytes=[0] * len(costs), levels=[(4, 1)])
    assert found.bottleneck == pytest.approx(other.bottleneck)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("microbatches", [1, 8])
def test_dapple_and_alpa_agree_where_nothing_is_sent(seed, microbatches):
    costs, _ = chain(seed)
    zero = [0.0] * len(costs)
    machines = Machines(machines=1, devices=4, inside=1, between=1)
    none = {"backward": zero, "activation_bytes": zero, "weight_bytes": zero, "machines": machines}

    def seconds(own: range, mesh: Submesh) -> float:
        return sum(costs[own.start : own.stop]) / mesh.size

    plan = alpa(seconds, layers=len(costs), hosts=1, devices=4, microbatches=microbatches)
    assert dapple(costs, **none, microbatches=microbatches).latency.total == pytest.approx(plan.total)
    assert plan.total == pytest.approx(microbatches * sum(costs) / 4)
