"""A choice that is changed at some nodes, and the change spread to the nodes around: how searches leave local minima.

One node alone rarely saves: its neighbours still pay for the old strategy. So neighbours follow, each of them once, as
long as that costs less while those that have not changed count for less than they cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from .partial_choice import joined_edges
from .problem import FORBIDDEN, Problem


class SpreadingChanges:
    """What changes of a problem's choices lead to."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.is_tight = bool(problem.is_tight.any())
        """Whether some choice exceeds the limit."""
        self.edges = joined_edges(problem)
        self.own = [np.where(cost >= FORBIDDEN, np.inf, cost) for cost in problem.costs]
        self.least = [[matrix.min(axis=1) for _, matrix, _ in own] for own in self.edges]
        """Per node and edge, what the edge costs at the least, by the node's strategy."""

    def spread(
        self, choice: np.ndarray, changes: Mapping[int, int], *, fixed: np.ndarray, inertia: float
    ) -> np.ndarray:
        """The choice after changes, what follows from them, and descent.

        A node that did not change yet takes the strategy of least

            own cost + sum over neighbours j: e(p, x_j)  if j has changed or is fixed,
                                              inertia e(p, x_j) + (1 - inertia) min_q e(p, q)  otherwise.

        Then each of the nodes that were looked at takes its cheapest strategy until none saves. No node takes more
        memory than is left; what exceeds the limit because of the changes stays.

        Args:
            choice: of all nodes.
            changes: node -> another strategy; they stay so until descent, and after it where fixed.
            fixed: whether a node keeps its strategy, bool [nodes].
            inertia: above 0 and below 1; with little, changes spread further.
        """
        choice, settled = choice.copy(), fixed.copy()
        for node, strategy in changes.items():
            choice[node], settled[node] = strategy, True
        memory = self.problem.memory_over_time(choice) if self.is_tight else None
        queue = self._neighbours(changes, settled)
        seen = dict.fromkeys(node for node in changes if not fixed[node])
        while queue:
            node = next(iter(queue))
            del queue[node]
            seen[node] = None
            if self._improved(choice, node, self._expected(choice, node, settled, inertia), memory):
                settled[node] = True
                queue |= self._neighbours([node], settled)
        while seen:
            node = next(iter(seen))
            del seen[node]
            if self._improved(choice, node, self._expected(choice, node, None, 1.0), memory):
                seen |= self._neighbours([node], fixed)
        return choice

    def _neighbours(self, nodes: Iterable[int], but: np.ndarray) -> dict[int, None]:
        return {j: None for node in nodes for j, _, _ in self.edges[node] if not but[j]}

    def _expected(self, choice: np.ndarray, node: int, settled: np.ndarray | None, inertia: float) -> np.ndarray:
        """What each strategy of a node costs; all neighbours count in full if it isn't said which are settled."""
        total = self.own[node].copy()
        for (j, matrix, _), least in zip(self.edges[node], self.least[node], strict=True):
            if settled is None or settled[j]:
                total += matrix[:, choice[j]]
            else:
                total += inertia * matrix[:, choice[j]] + (1 - inertia) * least
        return total

    def _improved(self, choice: np.ndarray, node: int, costs: np.ndarray, memory: np.ndarray | None) -> bool:
        """Whether another strategy that fits costs less, by more than is rounded, which the node takes then."""
        now, costs_now = choice[node], costs[choice[node]]
        (first, end), more = self.problem.spans[node], self.problem.usages[node] - self.problem.usages[node][now]
        if memory is not None and first < end:
            room = max(0.0, self.problem.memory_bytes - float(memory[first:end].max()))
            costs = np.where(more <= room, costs, np.inf)
        best = int(costs.argmin())
        if not costs[best] + 1e-12 * abs(costs[best]) < costs_now:
            return False
        choice[node] = best
        if memory is not None:
            memory[first:end] += more[best]
        return True
