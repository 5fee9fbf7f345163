"""Branch and bound over all choices, the reference for small problems."""

from __future__ import annotations

import math
import time

import numpy as np

from ..errors import ShardingError
from .problem import FORBIDDEN, Problem
from .solution import Solution, nothing_found

MOST_CHOICES = 1e12
"""Choices up to which branch and bound is tried."""


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """The cheapest of all choices, by depth-first branch and bound.

    Nodes are decided in order, cheapest strategy first. A partial choice is left when its cost and the least that
    undecided nodes and edges can add reach the best cost, or when its memory and the least of undecided nodes exceed
    the limit at some time. Exponential in the number of nodes; `seed` has no effect.

    Raises:
        ShardingError: more than 1e12 choices, or nothing fits.
    """
    problem = problem.limited(memory_bytes)
    choices = float(np.prod(problem.num_strategies.astype(float)))
    if choices > MOST_CHOICES:
        required = f"at most {MOST_CHOICES:g} choices"
        raise ShardingError(f"exhaustive: {problem!r}", found=f"{choices:g}", required=required, fix='algorithm="auto"')
    search = _Search(problem, time.monotonic() + seconds)
    start = time.monotonic()
    is_complete = search.run()
    if search.best is None:
        raise nothing_found(problem, "exhaustive", is_proven=is_complete)
    return Solution(
        problem=problem,
        choice=np.array(search.best, np.int64),
        algorithm="exhaustive",
        bound=search.best_cost if is_complete else -math.inf,
        evaluations=search.evaluations,
        seconds=time.monotonic() - start,
    )


class _Search:
    """The state of the depth-first search."""

    def __init__(self, problem: Problem, deadline: float):
        self.problem, self.deadline = problem, deadline
        self.best: list[int] | None = None
        self.best_cost, self.evaluations = FORBIDDEN, 0
        n = problem.num_nodes
        self.earlier: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(n)]
        """Per node, its edges to earlier nodes, with rows of the earlier node's strategies."""
        for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
            self.earlier[max(i, j)].append((min(i, j), matrix if i < j else matrix.T))
        least = [problem.costs[i].min() + sum(m.min() for _, m in self.earlier[i]) for i in range(n)]
        self.rest = np.append(np.cumsum(least[::-1])[::-1], 0.0)
        smallest = [int(np.argmin(usage)) for usage in problem.usages]
        self.memory = problem.memory_over_time(smallest)
        """Of decided nodes, and the least of the others, at each time."""

    def run(self) -> bool:
        """Searches everything; False if time or the user ends it."""
        try:
            self._decide(0, [], 0.0)
        except (KeyboardInterrupt, TimeoutError):
            return False
        return True

    def _decide(self, i: int, choice: list[int], cost: float) -> None:
        if i == self.problem.num_nodes:
            self.best, self.best_cost = list(choice), cost
            return
        costs = cost + self.problem.costs[i]
        for j, matrix in self.earlier[i]:
            costs = costs + matrix[choice[j]]
        usage = self.problem.usages[i] - self.problem.usages[i].min()
        first, end = self.problem.spans[i]
        span = self.memory[first:end]
        for p in np.argsort(costs, kind="stable").tolist():
            self.evaluations += 1
            if self.evaluations % 1024 == 0 and time.monotonic() > self.deadline:
                raise TimeoutError
            if costs[p] + self.rest[i + 1] >= self.best_cost:
                break
            if usage[p] and (span + usage[p] > self.problem.memory_bytes).any():
                continue
            span += usage[p]
            self._decide(i + 1, [*choice, p], float(costs[p]))
            span -= usage[p]
