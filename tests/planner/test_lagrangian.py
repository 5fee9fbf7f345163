"""Our solver's search where the integer program of the whole is too large: it still finds the least cost."""

import time

import numpy as np
import pytest
from support.planning import least_cost, random_problem

import sharding
from sharding.planner import FORBIDDEN, Problem, forests, lagrangian
from sharding.planner.core_problem import Core
from sharding.planner.problem_reduction import Reduction


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


def search_of(problem: Problem, seed: int) -> lagrangian._Search:
    """A search that knows some choice within the limit, and how good strategies are."""
    core = Core.of(Reduction.of(problem.limited(1.2 * problem.memory_bytes)))
    assert core.nodes
    search = lagrangian._Search(core, np.random.default_rng(seed), time.monotonic() + 60)
    rng = np.random.default_rng(seed)
    while search.current is None:
        search._offer(rng.integers(core.problem.num_strategies))
    search.found.append(rng.integers(core.problem.num_strategies))
    search.gaps = rng.exponential(size=len(core.soft))
    return search


@pytest.mark.parametrize("seed", range(6))
def test_parts_have_the_strategies_of_known_choices_and_are_as_large_as_asked(seed):
    search = search_of(ring(12, seed), seed)
    sizes, pairs = search.core.problem.num_strategies, search.core.problem.edges.tolist()

    def entries(allowed):
        counts = [len(one) for one in allowed]
        return sum(counts[i] * counts[j] for i, j in pairs if counts[i] > 1 and counts[j] > 1)

    known = [{*choice.tolist()} for choice in np.stack([*search.found, search.current], axis=1)]
    before = 0
    for most in (1, 30, 100, 300, 10**9):
        search.entries, search.rng = most, np.random.default_rng(seed)  # blurred as before
        allowed = search._kernel()
        assert all(own <= {*one.tolist()} for own, one in zip(known, allowed, strict=True))
        assert all(
            one.tolist() == sorted({*one.tolist()}) and one.max() < n for one, n in zip(allowed, sizes, strict=True)
        )
        assert entries(allowed) <= most or sum(map(len, allowed)) <= sum(map(len, known)) + 1
        assert before <= entries(allowed)
        before = entries(allowed)
        near = search._neighbourhood()
        assert all(now in one for now, one in zip(search.current.tolist(), near, strict=True))
        assert entries(near) <= most + 5 * 5 * 12
    assert before == entries([range(n) for n in sizes])  # all strategies


@pytest.mark.parametrize("seed", range(12))
def test_trees_are_changed_where_that_saves_and_fits_best_first(seed):
    """One after the other by what each saves, against the cost and memory of whole choices."""
    search = search_of(ring(14, seed), seed)
    core, rng, start = search.core, np.random.default_rng(seed), search.current
    forest = forests.random_forest(core.arcs, rng, largest=4)
    proposed = start.copy()
    forest.minimise(core.soft + rng.normal(0, 20, len(core.soft)), proposed)

    def with_trees(choice, trees):
        return np.where(np.isin(forest.tree, trees), proposed, choice)

    changed = {int(tree) for tree in forest.tree[proposed != start]}
    savings = {tree: core.cost(start) - core.cost(with_trees(start, [tree])) for tree in changed}
    expected = start
    for tree in sorted((tree for tree in changed if savings[tree] > 0), key=lambda tree: -savings[tree]):
        trial = with_trees(expected, [tree])
        expected = trial if core.excess(trial).max(initial=0) <= 0 else expected
    is_better = core.cost(expected) < core.cost(start)
    assert search._accepted(forest, proposed) == is_better
    assert core.cost(search.current) == core.cost(expected)
    assert core.excess(search.current).max(initial=0) <= 0


def test_an_interrupt_returns_the_best_so_far(monkeypatch):
    monkeypatch.setattr(lagrangian, "MOST_ENTRIES", -1)

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(lagrangian._Search, "_merge", interrupted)
    solution = lagrangian.solve(ring(20, 1), seconds=4)
    assert solution.problem.is_feasible(solution.choice)
    assert solution.seconds < 4


@pytest.mark.parametrize("seed", range(8))
def test_message_passing_alone_proves_what_it_finds(seed, monkeypatch):
    """Chains with parallel ends, whose reductions are left out: no integer program is needed."""
    monkeypatch.setattr(Reduction, "run", lambda self, until=0.0: None)
    rng = np.random.default_rng(seed)
    costs = [rng.integers(0, 20, 4).astype(float) for _ in range(7)]
    problem = Problem.of(costs, [(i, i + 1, rng.integers(0, 20, (4, 4)).astype(float)) for i in range(6)])

    def never(*args, **options):
        raise AssertionError("an integer program")

    monkeypatch.setattr(lagrangian, "minimise_core", never)
    solution = lagrangian.solve(problem)
    assert solution.is_proven
    assert solution.cost == solution.bound == least_cost(problem)
