"""Decisions one by one: what is dropped or forced is never needed, and equal signatures have equal futures."""

import itertools
import math

import numpy as np
import pytest
from support.planning import five_nodes, least_cost, plain_cost, plain_peak, random_problem

from sharding import planner
from sharding.planner.partial_choice import PartialChoice, decision_order


def least_completion(problem, choice):
    """The least cost of all choices within the limit that agree with the decided nodes."""
    ranges = [range(len(cost)) if p < 0 else [p] for cost, p in zip(problem.costs, choice.tolist(), strict=True)]
    found = [x for x in itertools.product(*ranges) if plain_peak(problem, x) <= problem.memory_bytes]
    costs = [plain_cost(problem, x) for x in found]
    return min((cost for cost in costs if cost < planner.FORBIDDEN), default=math.inf)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_that_is_dropped_is_needed(seed):
    problem = random_problem(seed, nodes=6, forbidden=0.2)
    rng = np.random.default_rng(seed)
    partial = PartialChoice(problem)
    partial.propagate(list(range(problem.num_nodes)))
    assert least_completion(problem, partial.choice) == least_cost(problem)
    while not partial.is_dead and (undecided := np.flatnonzero(partial.choice < 0).tolist()):
        node = int(rng.choice(undecided))
        options = partial.options(node)
        if not len(options):
            break
        partial.decide(node, int(rng.choice(options)))
        before = least_completion(problem, partial.choice)
        partial.propagate([j for j, _, _ in partial.edges[node]])
        assert partial.is_dead or least_completion(problem, partial.choice) == before
        assert not partial.is_dead or before == math.inf
    if not partial.is_dead and (partial.choice >= 0).all():
        choice = tuple(partial.choice.tolist())
        assert partial.cost == plain_cost(problem, choice)
        assert plain_peak(problem, choice) <= problem.memory_bytes


@pytest.mark.parametrize("seed", range(5))
def test_equal_signatures_have_equal_futures(seed):
    problem = random_problem(40 + seed, nodes=7, strategies=2, forbidden=0.0)
    futures = {}
    decided = decision_order(problem)[: problem.num_nodes // 2 + 1]
    for strategies in itertools.product(*(range(len(problem.costs[i])) for i in decided)):
        partial = PartialChoice(problem)
        for node, strategy in zip(decided, strategies, strict=True):
            if strategy not in partial.options(node):
                break
            partial.decide(node, strategy)
        else:
            to_come = least_completion(problem, partial.choice) - partial.cost
            assert futures.setdefault(partial.signature(), to_come) == to_come
    assert futures


def test_a_forbidden_pair_decides_its_other_node():
    forbidden = np.where(np.eye(3) > 0, 0, planner.FORBIDDEN)
    edges = [(0, 1, forbidden), (2, 1, forbidden), (2, 3, forbidden)]
    partial = PartialChoice(planner.Problem.of([[1, 2, 3]] * 4, edges))
    partial.decide(0, 2)
    partial.propagate([1])
    assert partial.choice.tolist() == [2, 2, 2, 2]
    assert partial.cost == 12


def test_the_order_follows_edges():
    order = decision_order(five_nodes(is_chain=True))
    for count in range(1, 5):
        assert any(abs(order[count] - earlier) == 1 for earlier in order[:count])
