"""MindSpore's double recursion: what it finds for two matmuls, and what it never does."""

import numpy as np
import pytest
from support.planning import five_nodes, random_axes, random_problem, two_matmuls

import sharding
from sharding import planner

ROWS, CONTRACTED, COLUMNS = range(3)


def degrees(rows):
    """By how much each matmul's rows, contracted dim and columns are divided."""
    problem, strategies = two_matmuls(rows)
    solution = planner.solve(problem, "mindspore")
    assert solution.cost >= planner.solve(problem, "tofu").cost
    return [tuple(2 ** strategies[p].count(dim) for dim in range(3)) for p in solution.choice]


@pytest.mark.parametrize("rows", [1024, 2048, 4096, 8192])
def test_columns_then_rows_of_weights(rows):
    batch = 2 if rows <= 2048 else 4
    assert degrees(rows) == [(batch, 1, 8 // batch), (batch, 8 // batch, 1)]


def test_few_rows_are_not_divided():
    assert degrees(64) == [(1, 2, 4), (1, 4, 2)]


def test_many_rows_are_all_that_is_divided():
    assert degrees(65536) == [(8, 1, 1), (8, 1, 1)]


@pytest.mark.parametrize("rows", [64, 2000, 20000])
def test_without_neighbours_the_largest_dim_is_halved(rows):
    both, strategies = two_matmuls(rows, rounds=2)
    problem = planner.Problem.of(both.costs[:1], splits=both.splits[:1])
    sizes = [rows, 1024, 4096]
    for dim in strategies[planner.solve(problem, "mindspore").choice[0]]:
        assert sizes[dim] == max(sizes)
        sizes[dim] /= 2


def test_evaluations_grow_with_nodes_and_rounds():
    problem, strategies = two_matmuls(1024)
    # Per round, what each node may still take: 4 of its 64 strategies.
    assert planner.solve(problem, "mindspore").evaluations == 2 * 3 * 4
    assert planner.solve(random_axes(0, nodes=9), "mindspore").evaluations == 9 * 2 * 3


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_holds(seed):
    for problem in (random_axes(seed, limited=True), random_problem(seed, forbidden=0.0)):
        solution = planner.solve(problem, "mindspore")
        assert solution.peak_bytes <= problem.memory_bytes
        assert solution.cost >= planner.solve(problem, "tensoropt").cost


def test_the_edges_of_a_node_that_another_forces_count_once():
    linked = np.where(np.eye(2) > 0, 0, planner.FORBIDDEN)
    problem = planner.Problem.of([[0, 90], [0, 80], [0, 5]], [(0, 1, linked), (1, 2, [[4, 0], [0, 0]])])
    solution = planner.solve(problem, "mindspore")
    assert (solution.choice.tolist(), solution.cost) == ([0, 0, 0], 4)


def test_a_dead_end_is_refused():
    # The first node's cheapest strategy leaves two colours to three nodes that all must differ.
    forbid = planner.FORBIDDEN
    differ = np.where(np.eye(3) > 0, forbid, 0)
    edges = [(0, i, [[0, 0, forbid], [0, 0, 0]]) for i in (1, 2, 3)]
    problem = planner.Problem.of([[0, 50], *[[0, 1, 2]] * 3], edges + [(1, 2, differ), (2, 3, differ), (3, 1, differ)])
    assert planner.solve(problem, "exhaustive").cost == 53
    with pytest.raises(sharding.ShardingError, match="mindspore"):
        planner.solve(problem, "mindspore")


def test_one_pass_without_splits():
    assert planner.solve(five_nodes(), "mindspore").evaluations == 15


def test_a_dead_end_is_no_proof():
    """Earlier decisions may leave a node no strategy where another order of decisions finds one."""
    texts = []
    for seed in range(200):
        problem = random_problem(seed, forbidden=0.5, limited=False)
        try:
            planner.solve(problem, "mindspore")
        except sharding.ShardingError as error:
            texts.append(str(error))
    assert texts
    assert all("none found" in text and 'algorithm="auto"' in text for text in texts)
