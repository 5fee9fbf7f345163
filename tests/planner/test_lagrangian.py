"""Our solver's search where the integer program of the whole is too large: it still finds the least cost."""

import numpy as np
import pytest
from support.planning import least_cost, random_problem

import sharding
from sharding.planner import FORBIDDEN, Problem, lagrangian


def ring(num_nodes: int, seed: int) -> Problem:
    """A ring with chords, all nodes alive for a while, memory for half of what is wanted."""
    rng = np.random.default_rng(seed)
    pairs = [(i, (i + step) % num_nodes) for i in range(num_nodes) for step in (1, 5)]
    usages = rng.integers(1, 50, (num_nodes, 5))
    starts = np.arange(num_nodes)
    problem = Problem.of(
        500 // usages + rng.integers(0, 9, usages.shape),
        [(i, j, rng.integers(0, 30, (5, 5))) for i, j in pairs],
        usages=list(usages),
        intervals=np.stack([starts, starts + rng.integers(2, 9, num_nodes)], axis=1),
    )
    return problem.limited(1.3 * problem.least_peak_bytes)


@pytest.mark.parametrize("seed", range(4))
def test_small_problems_without_the_whole_program(seed, monkeypatch):
    monkeypatch.setattr(lagrangian, "MOST_ENTRIES", -1)
    problem = random_problem(seed, nodes=9, forbidden=0.05)
    best = least_cost(problem)
    if best >= FORBIDDEN:
        with pytest.raises(sharding.ShardingError, match="a choice within"):
            lagrangian.solve(problem, seconds=0.5)
        return
    solution = lagrangian.solve(problem, seconds=0.5)
    assert solution.cost == best
    assert solution.bound <= best


def test_search_comes_close_to_the_optimum(monkeypatch):
    problem = ring(24, 0)
    exact = lagrangian.solve(problem, seconds=60)
    assert exact.is_proven
    monkeypatch.setattr(lagrangian, "MOST_ENTRIES", -1)
    monkeypatch.setattr(lagrangian, "PART_ENTRIES", 300)
    found = lagrangian.solve(problem, seconds=2)
    assert 0.7 * exact.cost <= found.bound <= exact.cost <= found.cost <= 1.05 * exact.cost


def test_an_interrupt_returns_the_best_so_far(monkeypatch):
    monkeypatch.setattr(lagrangian, "MOST_ENTRIES", -1)

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(lagrangian._Search, "_merge", interrupted)
    solution = lagrangian.solve(ring(20, 1), seconds=4)
    assert solution.problem.is_feasible(solution.choice)
    assert solution.seconds < 4
