"""FlexFlow's chain: changes by delta are those of full evaluation, and the acceptance rate is Metropolis'."""

import numpy as np
import pytest
from support.planning import five_nodes, random_problem

from sharding import planner
from sharding.planner import markov_chain
from sharding.planner.markov_chain import Annealing, Chain


@pytest.mark.parametrize("seed", range(5))
def test_delta_and_full_evaluation_agree(seed):
    problem = random_problem(seed, nodes=9, forbidden=0.0)
    rng = np.random.default_rng(seed)
    chain = Chain(problem, np.zeros(problem.num_nodes, np.int64))
    for _ in range(300):
        node = int(rng.integers(problem.num_nodes))
        strategy = int(rng.integers(problem.num_strategies[node]))
        excess = chain.excess_after(node, strategy)
        chain.move(node, strategy)
        assert chain.cost == problem.cost(chain.choice)
        if chain.is_tight:
            assert chain.memory.tolist() == problem.memory_over_time(chain.choice).tolist()
        assert chain.excess == excess == max(0.0, problem.peak_bytes(chain.choice) - problem.memory_bytes)


def test_a_move_looks_at_the_edges_of_one_node():
    chain = Chain(five_nodes(), np.zeros(5, np.int64))
    assert [len(edges) for edges in chain.edges] == [2, 3, 3, 2, 2]


def test_a_node_follows_with_the_strategy_that_goes_best():
    edge = [[5, 1, 2], [0, 9, 9], [4, 4, 1]]
    chain = Chain(planner.Problem.of([[0, 0, 0], [0, 3, 0]], [(0, 1, edge)]), [0, 0])
    assert [chain.following(0, 0) for chain.choice[0] in range(3)] == [(1, 2), (1, 0), (1, 2)]
    chain.choice[1] = 1
    assert chain.following(1, 0) == (0, 0)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_the_temperature_has_the_scale_of_costs(scale, monkeypatch):
    monkeypatch.setattr(markov_chain, "PROPOSALS", 4000)
    problem = random_problem(7, nodes=10, forbidden=0.0, limited=False)
    edges = [(i, j, scale * m) for (i, j), m in zip(problem.edges.tolist(), problem.edge_costs, strict=True)]
    scaled = planner.Problem.of([scale * cost for cost in problem.costs], edges)
    heats = [Annealing(p, 0, np.inf).heat for p in (problem, scaled)]
    assert heats[1] == pytest.approx(scale * heats[0])
    assert planner.solve(scaled, "flexflow").cost == pytest.approx(scale * planner.solve(problem, "exhaustive").cost)


def test_linked_nodes_change_together(monkeypatch):
    """Where all other pairs are forbidden no node can change alone."""
    monkeypatch.setattr(markov_chain, "PROPOSALS", 20_000)
    linked = np.where(np.eye(3) > 0, 0, planner.FORBIDDEN)
    problem = planner.Problem.of([[0, 3, 3], [4, 1, 9], [4, 1, 9]], [(0, 1, linked), (1, 2, linked)])
    assert planner.solve(problem, "flexflow").cost == 5


def test_rejected_changes_leave_everything_as_it_was():
    problem = random_problem(3, nodes=9, forbidden=0.1)
    search = Annealing(problem, 0, np.inf)
    search.chain.restart(search.cheapest)
    for _ in range(2000):
        search.propose(1e-6)
    chain = search.chain
    assert chain.cost == problem.cost(chain.choice)
    assert chain.excess == max(0.0, problem.peak_bytes(chain.choice) - problem.memory_bytes)
