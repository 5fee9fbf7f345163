"""OptCNN's eliminations: what they leave, and that each keeps the least cost."""

import numpy as np
import pytest
from support.planning import five_nodes, least_cost, random_problem

import sharding
from sharding import planner
from sharding.planner import elimination


def least_left(state: elimination.Elimination) -> float:
    """The least cost of all choices of the nodes that are left."""
    nodes = list(state.costs)
    best = np.inf
    for choice in np.ndindex(*(len(state.costs[i]) for i in nodes)):
        x = dict(zip(nodes, choice, strict=True))
        tables = sum(table[tuple(x[i] for i in scope)] for scope, table in state.tables.items())
        best = min(best, state.constant + sum(state.costs[i][p] for i, p in x.items()) + tables)
    return float(best)


def test_five_nodes_leave_four():
    state = elimination.optcnn(five_nodes())
    assert list(state.costs) == [0, 1, 2, 4]
    assert len(state.tables) == 5
    assert state.tables[(2, 4)].tolist() == [[11, 7, 9], [8, 3, 5], [8, 6, 6]]


def test_a_chain_leaves_its_ends():
    state = elimination.optcnn(five_nodes(is_chain=True))
    assert list(state.costs) == [0, 4]


@pytest.mark.parametrize("seed", range(10))
def test_every_elimination_keeps_the_least_cost(seed):
    problem = random_problem(seed, nodes=6, forbidden=0.0, limited=False)
    state = elimination.Elimination(problem.costs, problem.edges, problem.edge_costs)
    best = least_cost(problem)
    for node in range(problem.num_nodes):
        assert least_left(state) == best
        state.eliminate(node)
    assert state.constant == best


def test_wide_problems_are_refused(monkeypatch):
    monkeypatch.setattr(elimination, "MOST_ENTRIES", 10)
    with pytest.raises(sharding.ShardingError, match="tables of at most 10 entries"):
        planner.solve(five_nodes(), "optcnn")
