"""FlexFlow's Markov chain Monte Carlo: change one node at random, accept what costs more with falling probability."""

from __future__ import annotations

import math
import time

import numpy as np

from .problem import FORBIDDEN, Problem
from .solution import Solution, nothing_found

PROPOSALS = 200_000
"""After which the search ends, if not by time."""
PENALTY = 2.0
"""Price of memory above the limit: of the whole limit, as a multiple of the first cost."""


class Chain:
    """A choice, its cost and its memory over time, changed one node at a time."""

    def __init__(self, problem: Problem, choice: np.ndarray):
        self.problem, self.choice = problem, choice.copy()
        self.cost, self.memory = problem.cost(choice), problem.memory_over_time(choice)
        self.edges: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(problem.num_nodes)]
        for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
            self.edges[i].append((j, matrix))
            self.edges[j].append((i, matrix.T))

    def delta(self, node: int, strategy: int) -> float:
        """By how much the cost changes if a node takes another strategy, from that node's edges alone."""
        old, own = self.choice[node], self.problem.costs[node]
        pairs = (m[strategy, self.choice[j]] - m[old, self.choice[j]] for j, m in self.edges[node])
        return float(own[strategy] - own[old] + sum(pairs))

    def excess_after(self, node: int, strategy: int) -> float:
        """The bytes above the limit at the worst time if a node takes another strategy."""
        usage, (first, end) = self.problem.usages[node], self.problem.spans[node]
        memory = self.memory.copy()
        memory[first:end] += usage[strategy] - usage[self.choice[node]]
        return max(0.0, float(memory.max(initial=0.0)) - self.problem.memory_bytes)

    def move(self, node: int, strategy: int) -> None:
        """Gives a node another strategy."""
        self.cost += self.delta(node, strategy)
        usage, (first, end) = self.problem.usages[node], self.problem.spans[node]
        self.memory[first:end] += usage[strategy] - usage[self.choice[node]]
        self.choice[node] = strategy


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """A cheap choice by Metropolis-Hastings from each node's cheapest strategy.

    A random node proposes a random strategy. It is accepted with probability `min(1, exp(-increase / temperature))`;
    the increase has a price for memory above the limit; the temperature falls from a node's mean cost to a thousandth.

    Raises:
        ShardingError: no choice that fits was found.

    References:
        Jia, Zaharia, Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 6.
        Deviation: the cost is the problem's sum, not a simulated makespan; the temperature falls; memory has a price.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    rng = np.random.default_rng(seed)
    chain = Chain(problem, np.array([int(cost.argmin()) for cost in problem.costs], np.int64))
    free = np.flatnonzero(problem.num_strategies > 1)
    finite = [matrix[matrix < FORBIDDEN] for matrix in (*problem.costs, *problem.edge_costs)]
    heat = 1.0 + 2 * sum(float(np.abs(f).mean()) for f in finite if f.size) / max(1, problem.num_nodes)
    penalty = PENALTY * heat * problem.num_nodes / problem.memory_bytes
    excess = max(0.0, float(chain.memory.max(initial=0.0)) - problem.memory_bytes)
    best = chain.choice.copy() if not excess and chain.cost < FORBIDDEN else None
    best_cost = chain.cost if best is not None else math.inf
    proposals = 0
    try:
        while proposals < PROPOSALS and len(free) and time.monotonic() - start < seconds:
            temperature = heat * 1e-3 ** (proposals / PROPOSALS)
            proposals += 1
            node = int(free[rng.integers(len(free))])
            strategy = int(rng.integers(problem.num_strategies[node]))
            after = chain.excess_after(node, strategy)
            increase = chain.delta(node, strategy) + penalty * (after - excess)
            if increase > 0 and rng.random() >= math.exp(-min(700.0, increase / temperature)):
                continue
            chain.move(node, strategy)
            excess = after
            if not excess and chain.cost < best_cost:
                # Sums with forbidden costs lose digits.
                chain.cost = problem.cost(chain.choice)
                if chain.cost < min(best_cost, FORBIDDEN):
                    best, best_cost = chain.choice.copy(), chain.cost
    except KeyboardInterrupt:
        if best is None:
            raise
    if best is None:
        raise nothing_found(problem, "flexflow", is_proven=False)
    return Solution(
        problem=problem,
        choice=best,
        algorithm="flexflow",
        bound=-math.inf,
        evaluations=proposals,
        seconds=time.monotonic() - start,
    )
