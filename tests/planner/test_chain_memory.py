"""Galvatron's dynamic program against TensorOpt's frontier, and what it can't do."""

import numpy as np
import pytest
from support.planning import five_nodes, least_cost

import sharding
from sharding import planner
from sharding.planner import chain_memory


def random_chains(seed, *, scale=1.0):
    """One to three chains in a row, all alive together, some pairs forbidden."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    sizes = rng.integers(1, 5, n)
    order = rng.permutation(n)
    edges = []
    for i, j in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
        matrix = rng.integers(0, 20, (sizes[i], sizes[j])).astype(float)
        matrix[rng.random(matrix.shape) < 0.1] = planner.FORBIDDEN
        edges += [(i, j, matrix)] * int(rng.choice([0, 1, 1, 1, 2]))
    usages = [scale * rng.integers(1, 10, size) for size in sizes]
    problem = planner.Problem.of([rng.integers(0, 20, size) for size in sizes], edges, usages=usages)
    return problem.limited(problem.least_peak_bytes + scale * int(rng.integers(1, 12)))


@pytest.mark.parametrize("seed", range(20))
def test_it_is_exact_on_chains(seed):
    problem = random_chains(seed)
    best = least_cost(problem)
    if best == np.inf:
        with pytest.raises(sharding.ShardingError, match="every choice is forbidden"):
            planner.solve(problem, "galvatron")
        return
    solution = planner.solve(problem, "galvatron")
    assert solution.is_proven
    assert solution.cost == best


@pytest.mark.parametrize(("limit", "cost"), [(18, 24), (17, 26), (15, 26), (13, 29), (12, 30), (9, 33), (8, 46)])
def test_a_chain_of_five_within_limits(limit, cost):
    assert planner.solve(five_nodes(is_chain=True), "galvatron", memory_bytes=limit).cost == cost


@pytest.mark.parametrize("seed", range(10))
def test_rounding_up_keeps_the_limit(seed, monkeypatch):
    monkeypatch.setattr(chain_memory, "MEMORY_UNITS", 7)
    problem = random_chains(seed, scale=np.pi)
    try:
        solution = planner.solve(problem, "galvatron")
    except sharding.ShardingError as error:
        assert "auto" in str(error)
        return
    assert solution.peak_bytes <= problem.memory_bytes
    assert solution.cost >= least_cost(problem)


def test_more_memory_never_costs_more():
    problem = random_chains(3)
    limits = problem.least_peak_bytes + np.arange(15)
    costs = [planner.solve(problem, "galvatron", memory_bytes=limit).cost for limit in limits]
    assert costs == sorted(costs, reverse=True)


def test_what_is_no_chain_is_refused():
    with pytest.raises(sharding.ShardingError, match="a node with 3 neighbours"):
        planner.solve(five_nodes(), "galvatron")
    ring = [(0, 1, [[1]]), (1, 2, [[1]]), (2, 0, [[1]])]
    with pytest.raises(sharding.ShardingError, match="a cycle of 3 nodes"):
        planner.solve(planner.Problem.of([[1]] * 3, ring), "galvatron")


def test_a_limit_at_several_times_is_refused():
    problem = planner.Problem.of([[1, 2]] * 3, usages=[[4, 1]] * 3, intervals=[(0, 2), (1, 4), (3, 5)], memory_bytes=5)
    with pytest.raises(sharding.ShardingError, match="2 times at which different nodes"):
        planner.solve(problem, "galvatron")
    assert planner.solve(problem, "galvatron", memory_bytes=8).cost == 3


@pytest.mark.parametrize(("most", "is_proven"), [(7, False), (8, True), (9, True)])
def test_memory_is_counted_exactly_up_to_the_most_units(most, is_proven, monkeypatch):
    monkeypatch.setattr(chain_memory, "MEMORY_UNITS", most)
    problem = planner.Problem.of([[5, 0]] * 3, [], usages=[[0, 3], [0, 5], [0, 7]]).limited(8)
    solution = planner.solve(problem, "galvatron")
    assert solution.is_proven == is_proven
    assert solution.peak_bytes <= 8
