"""Repair of choices that exceed the limit."""

import numpy as np
import pytest
from support.planning import random_problem

from sharding.planner import Problem
from sharding.planner.core_problem import Core
from sharding.planner.memory_repair import fit
from sharding.planner.problem_reduction import Reduction


@pytest.mark.parametrize("seed", range(20))
def test_any_choice_is_made_to_fit(seed):
    problem = random_problem(seed, nodes=10, forbidden=0.0)
    core = Core.of(Reduction.of(problem))
    choice = np.random.default_rng(seed).integers(core.problem.num_strategies)
    assert fit(core, core.soft, choice)
    assert problem.is_feasible(core.restore(choice))


def test_the_move_that_costs_least_per_byte():
    # Two nodes have 8 bytes each within 12: the second saves its bytes for less.
    problem = Problem.of([[0, 9], [0, 4]], [(0, 1, [[0, 1], [1, 0]])], usages=[[8, 4], [8, 4]], memory_bytes=12)
    reduction = Reduction.of(problem)
    reduction._queue.clear()
    core = Core.of(reduction)
    choice = np.zeros(2, np.int64)
    assert fit(core, core.soft, choice)
    assert choice.tolist() == [0, 1]
