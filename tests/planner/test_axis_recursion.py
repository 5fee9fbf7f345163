"""ToFu's recursion: each round is exact, and the whole is never better than an exact solver."""

import itertools

import numpy as np
import pytest
from support.planning import five_nodes, plain_cost, random_axes, two_matmuls

import sharding
from sharding import planner
from sharding.planner import mesh_axes


def least(problem, strategies):
    """The least cost of all choices of these strategies."""
    return min(plain_cost(problem, choice) for choice in itertools.product(*map(np.ndarray.tolist, strategies)))


@pytest.mark.parametrize("seed", range(10))
def test_every_round_is_exact(seed):
    problem = random_axes(seed)
    solution = planner.solve(problem, "tofu")
    first_rounds = [
        int(np.flatnonzero((split == [split[p, 0], -1]).all(axis=1))[0])
        for split, p in zip(problem.splits, solution.choice, strict=True)
    ]
    assert plain_cost(problem, tuple(first_rounds)) == least(problem, mesh_axes.allowed(problem, 0, None))
    assert solution.cost == least(problem, mesh_axes.allowed(problem, 1, np.array(first_rounds)))
    assert solution.cost >= planner.solve(problem, "tensoropt").cost
    assert not solution.is_proven


@pytest.mark.parametrize("seed", range(10))
def test_the_limit_holds_in_the_last_round(seed):
    problem = random_axes(seed, limited=True)
    solution = planner.solve(problem, "tofu")
    assert solution.peak_bytes <= problem.memory_bytes
    assert solution.cost >= planner.solve(problem, "tensoropt").cost


def test_recursion_shards_one_array_in_several_dims():
    problem, strategies = two_matmuls(2048)
    solution = planner.solve(problem, "tofu")
    assert sorted(strategies[solution.choice[0]]) == [0, 2, 2]
    assert solution.cost >= planner.solve(problem, "optcnn").cost


def test_one_round_is_exact():
    solution = planner.solve(five_nodes(), "tofu")
    assert solution.is_proven
    assert solution.cost == 26


def test_rounds_keep_what_earlier_ones_decided():
    problem = planner.Problem.of([[1, 1, 1]], splits=[[[0, 1], [0, -1], [1, 0]]])
    assert [own.tolist() for own in mesh_axes.allowed(problem, 0, None)] == [[1]]
    assert [own.tolist() for own in mesh_axes.allowed(problem, 1, np.array([1]))] == [[0, 1]]
    # Without a strategy that shards nothing later, all that agree so far are left.
    problem = planner.Problem.of([[1, 1]], splits=[[[0, 1], [1, 0]]])
    assert [own.tolist() for own in mesh_axes.allowed(problem, 0, None)] == [[0, 1]]


def test_what_no_round_allows_is_refused():
    forbidden = [[planner.FORBIDDEN]]
    with pytest.raises(sharding.ShardingError, match="forbidden"):
        planner.solve(planner.Problem.of([[1], [1]], [(0, 1, forbidden)]), "tofu")
