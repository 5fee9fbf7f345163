"""Changes that spread: what follows from one node's, by hand; and what they never do."""

import numpy as np
import pytest
from support.planning import random_problem

from sharding import planner
from sharding.planner.spreading_changes import SpreadingChanges


def ring(count=4):
    """Nodes that pay 3 for each neighbour with another strategy; strategy 1 costs 0.5 more, but 5 less of the last."""
    apart = 3 * (1 - np.eye(2))
    return planner.Problem.of([[0, 0.5]] * (count - 1) + [[5, 0]], [(i, (i + 1) % count, apart) for i in range(count)])


@pytest.mark.parametrize(("inertia", "expected"), [(0.1, 1), (0.9, 0)])
def test_a_group_is_left_together(inertia, expected):
    """With little inertia all follow; with much none does, and descent takes the change back."""
    problem = ring()
    nothing = np.zeros(problem.num_nodes, bool)
    start = np.zeros(problem.num_nodes, np.int64)
    for node in range(problem.num_nodes):
        alone = start.copy()
        alone[node] = 1
        assert problem.cost(alone) > problem.cost(start)
    found = SpreadingChanges(problem).spread(start, {0: 1}, fixed=nothing, inertia=inertia)
    assert found.tolist() == [expected] * problem.num_nodes
    assert start.tolist() == [0] * problem.num_nodes


@pytest.mark.parametrize("seed", range(20))
def test_fixed_nodes_stay_and_what_fits_still_does(seed):
    problem = random_problem(seed, nodes=9, forbidden=0.1)
    rng = np.random.default_rng(seed)
    changes = SpreadingChanges(problem)
    smallest = np.array([int(usage.argmin()) for usage in problem.usages])
    for _ in range(10):
        fixed = rng.random(problem.num_nodes) < 0.3
        node = int(rng.integers(problem.num_nodes))
        change = {node: int(smallest[node])}
        found = changes.spread(smallest, change, fixed=fixed, inertia=rng.uniform(0.05, 0.95))
        assert (found[fixed] == smallest[fixed]).all()
        assert problem.peak_bytes(found) <= problem.memory_bytes


@pytest.mark.parametrize("seed", range(10))
def test_the_end_is_a_local_minimum_around_the_change(seed):
    problem = random_problem(seed, nodes=9, forbidden=0.0, limited=False)
    start = np.zeros(problem.num_nodes, np.int64)
    nothing = np.zeros(problem.num_nodes, bool)
    changed = {node: int(problem.num_strategies[node]) - 1 for node in range(problem.num_nodes)}
    found = SpreadingChanges(problem).spread(start, changed, fixed=nothing, inertia=0.5)
    for node, count in enumerate(problem.num_strategies.tolist()):
        for strategy in range(count):
            other = found.copy()
            other[node] = strategy
            assert problem.cost(found) <= problem.cost(other)
