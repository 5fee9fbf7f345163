"""Forests and message passing against all choices of small problems."""

import itertools

import numpy as np
import pytest
from support.planning import least_cost, random_problem

from sharding.planner.forests import Arcs, random_forest
from sharding.planner.message_passing import Messages


@pytest.mark.parametrize("seed", range(20))
def test_a_forest_takes_its_best_strategies(seed):
    problem = random_problem(seed, forbidden=0.0)
    rng = np.random.default_rng(seed)
    forest = random_forest(Arcs.of(problem), rng, largest=[3, 100][seed % 2])
    start = rng.integers(problem.num_strategies)
    inside = np.flatnonzero(forest.tree >= 0)
    choice = start.copy()
    forest.minimise(problem.flat.costs, choice)
    outside = np.setdiff1d(np.arange(problem.num_nodes), inside)
    assert choice[outside].tolist() == start[outside].tolist()
    best = np.inf
    for strategies in itertools.product(*(range(problem.num_strategies[i]) for i in inside)):
        start[inside] = strategies
        best = min(best, problem.cost(start))
    assert problem.cost(choice) == best


@pytest.mark.parametrize("seed", range(20))
def test_a_forest_has_no_cycles_and_no_node_could_join(seed):
    problem = random_problem(seed, nodes=12)
    forest = random_forest(Arcs.of(problem), np.random.default_rng(seed), largest=1000)
    pairs = {tuple(sorted(edge)) for edge in problem.edges.tolist()}
    inside = set(np.flatnonzero(forest.tree >= 0).tolist())
    within = [pair for pair in pairs if inside.issuperset(pair)]
    assert len(within) == len(inside) - len({forest.tree[i] for i in inside})
    assert all(forest.tree[i] == forest.tree[j] for i, j in within)
    # A node outside closes a cycle: two edges to one tree, or parallel ones.
    for node in set(range(problem.num_nodes)) - inside:
        edges = [i + j - node for i, j in problem.edges.tolist() if node in (i, j)]
        trees = [forest.tree[i] for i in edges if i in inside]
        assert len(set(trees)) < len(trees)


@pytest.mark.parametrize("seed", range(20))
def test_messages_give_bounds_and_good_choices(seed):
    problem = random_problem(seed, nodes=8, forbidden=0.0, limited=False)
    messages = Messages(Arcs.of(problem), np.random.default_rng(seed))
    bounds = [messages.run(problem.flat.costs) for _ in range(50)]
    best = least_cost(problem)
    assert max(bounds) <= best + 1e-6
    assert bounds[-1] >= bounds[0] - 1e-6
    assert bounds[-1] >= 0.8 * best
    assert problem.cost(messages.choice(problem.flat.costs)) <= 1.1 * best
