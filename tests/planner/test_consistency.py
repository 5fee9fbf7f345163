"""What different published planners must agree on."""

import math

import numpy as np
import pytest
from support.planning import random_axes, random_problem

from sharding import planner

EXACT = ["alpa", "exhaustive", "lagrangian", "tensoropt", "automap"]
LEARNED_OR_GREEDY = ["tofu", "mindspore", "automap", "dqn", "reinforce"]


def chain(seed):
    """Layers that are all alive together, without a limit."""
    numbers = np.random.default_rng(seed)
    sizes = numbers.integers(2, 5, 6)
    edges = [(i, i + 1, numbers.integers(0, 20, (sizes[i], sizes[i + 1]))) for i in range(5)]
    usages = [numbers.integers(1, 10, size) for size in sizes]
    return planner.Problem.of([numbers.integers(0, 20, size) for size in sizes], edges, usages=usages)


@pytest.mark.parametrize("seed", range(6))
def test_a_frontier_at_a_limit_is_the_integer_program_and_galvatron(seed):
    problem = chain(seed)
    points = planner.frontier(problem)
    for limit in range(int(problem.least_peak_bytes), int(points[0].peak_bytes) + 2, 3):
        cost = next(point.cost for point in points if point.peak_bytes <= limit)
        for algorithm in ("alpa", "galvatron", "automap", "lagrangian"):
            assert planner.solve(problem, algorithm, memory_bytes=limit).cost == cost


@pytest.mark.parametrize("seed", range(6))
def test_exact_ones_are_equal(seed):
    problem = random_problem(60 + seed, nodes=9, strategies=3, forbidden=0.0)
    unlimited = problem.limited(math.inf)
    costs = {planner.solve(unlimited, algorithm).cost for algorithm in [*EXACT, "optcnn", "tofu"]}
    assert len(costs) == 1
    assert len({planner.solve(problem, algorithm).cost for algorithm in EXACT}) == 1


@pytest.mark.parametrize("algorithm", LEARNED_OR_GREEDY)
def test_heuristics_are_never_better_than_exact_ones(algorithm):
    for problem in (random_axes(3, nodes=5, limited=True), random_axes(4, nodes=5)):
        best = planner.solve(problem, "tensoropt").cost
        found = planner.solve(problem, algorithm, seed=2)
        assert best <= found.cost <= 2 * best
        assert found.peak_bytes <= problem.memory_bytes
