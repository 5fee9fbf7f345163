"""Reductions keep an optimal choice, within a limit too."""

import math

import numpy as np
import pytest
from support.planning import five_nodes, least_cost, random_problem

from sharding.planner import FORBIDDEN, Problem
from sharding.planner.core_problem import Core
from sharding.planner.cutting_planes import minimise_core
from sharding.planner.problem_reduction import Reduction


def least_of_core(core: Core) -> float:
    """The least cost of all choices of a core within the limit."""
    found = math.inf
    for choice in np.ndindex(*core.problem.num_strategies.tolist()):
        x = np.array(choice, np.int64)
        if core.excess(x).max(initial=0) <= 0 and core.cost(x) < FORBIDDEN:
            found = min(found, core.cost(x))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_least_cost_stays(seed):
    problem = random_problem(
        seed, forbidden=[0.0, 0.1, 0.4][seed % 3], refused=0.1 * (seed % 3 > 0), limited=seed % 4 > 0
    )
    core = Core.of(Reduction.of(problem))
    assert least_of_core(core) == least_cost(problem)


@pytest.mark.parametrize("seed", range(30))
def test_no_strategy_that_is_forbidden_is_left(seed):
    """Neither by itself nor with each strategy of a neighbour; unless all of a node are, of which one stays."""
    problem = random_problem(seed, nodes=9, forbidden=0.3, refused=0.1)
    core = Core.of(Reduction.of(problem))
    for node, costs in enumerate(core.problem.costs):
        forbidden = costs >= FORBIDDEN
        for (i, j), matrix in zip(core.problem.edges.tolist(), core.problem.edge_costs, strict=True):
            if node in (i, j):
                forbidden |= (matrix if node == i else matrix.T).min(axis=1) >= FORBIDDEN
        assert not forbidden.any() or len(costs) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_of_the_core_is_one_of_the_problem(seed):
    problem = random_problem(seed, nodes=9, forbidden=0.0)
    core = Core.of(Reduction.of(problem))
    rng = np.random.default_rng(seed)
    for _ in range(10):
        x = rng.integers(core.problem.num_strategies)
        assert problem.cost(core.restore(x)) == core.cost(x)
        fits = core.excess(x).max(initial=0) <= 0
        assert fits == (problem.peak_bytes(core.restore(x)) <= problem.memory_bytes)


def test_tied_nodes_are_one_with_several_lifetimes():
    same = np.where(np.eye(3) > 0, 0.0, FORBIDDEN)
    problem = Problem.of(
        [[0, 1, 2], [0, 0, 0]], [(0, 1, same)], usages=[[9, 5, 1]] * 2, intervals=[(0, 2), (4, 6)], memory_bytes=6
    )
    reduction = Reduction.of(problem)
    reduction.run()
    assert len(reduction.costs) == 1
    (parts,) = reduction.parts.values()
    assert len(parts) == 2
    assert least_of_core(Core.of(reduction)) == 1


def test_a_chain_without_memory_disappears():
    core = Core.of(Reduction.of(five_nodes(is_chain=True).limited(math.inf)))
    assert core.nodes == []
    assert core.constant == 24


@pytest.mark.parametrize("seed", range(10))
def test_a_restricted_core_keeps_the_choices_that_are_left(seed):
    problem = random_problem(seed, nodes=8, forbidden=0.0)
    core = Core.of(Reduction.of(problem))
    everything = [np.arange(count) for count in core.problem.num_strategies]
    assert least_of_core(core.restricted(everything)) == least_cost(problem)
    single = [np.array([count - 1]) for count in core.problem.num_strategies]
    last = core.problem.num_strategies - 1
    part = core.restricted(single)
    assert part.nodes == []
    assert part.restore(np.zeros(0, np.int64)).tolist() == last.tolist()
    assert part.constant == core.cost(last)


@pytest.mark.parametrize("seed", range(8))
def test_cutting_planes_are_exact(seed):
    problem = random_problem(seed, nodes=8)
    core = Core.of(Reduction.of(problem))
    if core.nodes:
        outcome = minimise_core(core, seconds=30)
        assert outcome.bound == (FORBIDDEN if math.isinf(least_cost(problem)) else least_cost(problem))
