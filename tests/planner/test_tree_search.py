"""Automap's tree search: proven where everything is explored, and near the optimum long before."""

import numpy as np
import pytest
from support.planning import five_nodes, least_cost, random_problem

from sharding import planner
from sharding.planner import tree_search
from sharding.planner.node_groups import equal_nodes
from sharding.planner.tree_search import TreeSearch


@pytest.mark.parametrize("seed", range(12))
def test_a_large_budget_is_exhaustive(seed):
    problem = random_problem(seed, nodes=10, strategies=3, forbidden=0.0)
    solution = planner.solve(problem, "automap")
    assert solution.is_proven
    assert solution.cost == least_cost(problem)
    assert solution.evaluations < tree_search.EPISODES


def grid(seed, size=7, strategies=5):
    """A square of nodes with edges to the right and down, too wide to be explored."""
    rng = np.random.default_rng(seed)
    at = np.arange(size * size).reshape(size, size)
    pairs = [*zip(at[:, :-1].flat, at[:, 1:].flat, strict=True), *zip(at[:-1].flat, at[1:].flat, strict=True)]
    edges = [(int(i), int(j), rng.integers(0, 20, (strategies, strategies))) for i, j in pairs]
    return planner.Problem.of(rng.integers(0, 20, (size * size, strategies)), edges)


def test_a_wide_problem_within_a_tenth(monkeypatch):
    monkeypatch.setattr(tree_search, "EPISODES", 60)
    problem = grid(0)
    solution = planner.solve(problem, "automap")
    best = planner.solve(problem, "optcnn").cost
    assert best <= solution.cost <= 1.1 * best
    assert solution.evaluations == 60
    assert solution.bound == -np.inf


def test_every_episode_ends_and_none_is_better_than_the_best():
    search = TreeSearch(five_nodes(), seed=0)
    costs = []
    while not search.is_done:
        search.episode()
        costs.append(search.best.cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 26
    assert search.best.cost == five_nodes().cost(search.best.choice)


def test_mean_costs_are_of_what_was_found():
    search = TreeSearch(grid(0, 4), seed=0)
    for _ in range(40):
        search.episode()
    root = next(iter(search.states.values()))
    means = root.total[root.visits > 0] / root.visits[root.visits > 0]
    assert root.visits.sum() >= 39
    assert search.best.cost <= means.min() and means.max() <= search.highest


def layers(count):
    """Equal layers of two ops: costs by formula, an op that is replicated costs much."""
    pair = [[9, 1, 1], [9, 1, 1]] * count
    edge = [[0, 4, 4], [4, 3, 1], [4, 0, 3]]
    return planner.Problem.of(pair, [(i, i + 1, edge) for i in range(2 * count - 1)])


def test_groups_do_not_depend_on_depth():
    assert len(equal_nodes(layers(6))) == len(equal_nodes(layers(20))) == 5
    assert len(equal_nodes(five_nodes())) == 5


def test_equal_seeds_give_equal_choices(monkeypatch):
    monkeypatch.setattr(tree_search, "EPISODES", 25)
    first, second = (planner.solve(grid(1, 5), "automap", seed=3).choice for _ in range(2))
    assert first.tolist() == second.tolist()


def test_an_interrupt_returns_the_best_so_far(monkeypatch):
    episode = TreeSearch.episode
    count = 0

    def interrupted(search):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        episode(search)

    monkeypatch.setattr(TreeSearch, "episode", interrupted)
    wide = grid(2, 6)
    pairs = list(zip(wide.edges.tolist(), wide.edge_costs, strict=True))
    edges = [(i + shift, j + shift, matrix) for shift in (0, 36) for (i, j), matrix in pairs]
    twice = planner.Problem.of([*wide.costs] * 2, edges)  # so that there are groups, searched first
    assert planner.solve(twice, "automap").evaluations == 3


def test_roll_outs_leave_a_local_minimum():
    """Strategy 1 costs more at all nodes but the last, and saves only if the whole chain takes it."""
    apart = 3 * (1 - np.eye(2))
    problem = planner.Problem.of([[0, 0.5]] * 7 + [[6, 0]], [(i, j, apart) for i in range(8) for j in range(i)])
    search = TreeSearch(problem, seed=0)
    together, alone = [1] * 8, [0] * 8
    for node in range(8):
        changed = [int(i == node) for i in range(8)]
        assert problem.cost(changed) > problem.cost(alone) > problem.cost(together)
    search.best = tree_search.Completion(problem.cost(alone), np.array(alone))
    found = [search._changed_best(search.start) for _ in range(40)]
    assert all(one.cost == problem.cost(one.choice) for one in found)
    assert min(one.cost for one in found) == problem.cost(together)
