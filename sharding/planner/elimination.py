"""Exact minimisation without a memory limit: nodes are eliminated one by one.

OptCNN's eliminations first: a node with one edge in and one edge out becomes an edge, parallel edges become one,

    e'(p, q) = min_s [e(p, s) + c(s) + e(s, q)],        e'(p, q) = e1(p, q) + e2(p, q),

then variable elimination on what is left: a node is replaced by a table over its neighbours. Tables have
`strategies ** width` entries; the order is the greedy one of smallest tables.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence

import numpy as np

from ..errors import ShardingError
from .problem import FORBIDDEN, Problem
from .solution import Solution, nothing_found

MOST_ENTRIES = 20_000_000
"""Entries of a table up to which a node is eliminated."""


Scope = tuple[int, ...]
"""Nodes of a table."""


class Elimination:
    """Costs as tables over nodes, and what the eliminated nodes do given the others."""

    def __init__(self, costs: Sequence[np.ndarray], edges: np.ndarray, edge_costs: Sequence[np.ndarray]):
        self.costs = dict(enumerate(costs))
        """Cost of each strategy of the nodes that are left."""
        self.tables: dict[Scope, np.ndarray] = {}
        """Costs of two or more nodes, by ascending nodes; parallel edges are added up."""
        self.touching: dict[int, set[Scope]] = {i: set() for i in self.costs}
        """The tables of each node that is left."""
        self.constant = 0.0
        self.undo: list[tuple[int, Scope, np.ndarray]] = []
        """Eliminated node, the nodes on which its strategy depends, its strategy for each of theirs."""
        for (i, j), matrix in zip(edges.tolist(), edge_costs, strict=True):
            self._add((i, j) if i < j else (j, i), matrix if i < j else matrix.T)

    def neighbours(self, node: int) -> Scope:
        """Nodes that share a table with a node, ascending."""
        return tuple(sorted({i for scope in self.touching[node] for i in scope} - {node}))

    def size(self, node: int) -> int:
        """Entries of the table by which a node is eliminated."""
        return math.prod(len(self.costs[i]) for i in (node, *self.neighbours(node)))

    def eliminate(self, node: int) -> None:
        """Replaces a node by the least that it adds to the cost of each choice of its neighbours."""
        scope = self.neighbours(node)
        axes = (*scope, node)
        total = np.zeros([len(self.costs[i]) for i in axes]) + self.costs.pop(node)
        for key in self.touching.pop(node):
            total += _expanded(self.tables.pop(key), key, axes)
            for i in key:
                if i != node:
                    self.touching[i].remove(key)
        self.undo.append((node, scope, total.argmin(axis=-1)))
        self._add(scope, total.min(axis=-1))

    def _add(self, scope: Scope, table: np.ndarray) -> None:
        if not scope:
            self.constant += float(table)
        elif len(scope) == 1:
            self.costs[scope[0]] = self.costs[scope[0]] + table
        elif scope in self.tables:
            self.tables[scope] = self.tables[scope] + table
        else:
            self.tables[scope] = table
            for i in scope:
                self.touching[i].add(scope)

    def choice(self, decided: dict[int, int] | None = None) -> dict[int, int]:
        """The best strategies of all nodes, given those of the nodes that are left."""
        found = dict(decided or {})
        for node, scope, best in reversed(self.undo):
            found[node] = int(best[tuple(found[i] for i in scope)])
        return found


def optcnn(problem: Problem) -> Elimination:
    """OptCNN's node and edge eliminations until no node has one edge in and one edge out."""
    state = Elimination(problem.costs, problem.edges, problem.edge_costs)
    into: dict[int, set[int]] = {i: set() for i in range(problem.num_nodes)}
    out: dict[int, set[int]] = {i: set() for i in range(problem.num_nodes)}
    for i, j in problem.edges.tolist():
        out[i].add(j)
        into[j].add(i)
    queue = list(range(problem.num_nodes))
    while queue:
        node = queue.pop()
        if node not in state.costs or len(into[node]) != 1 or len(out[node]) != 1 or into[node] == out[node]:
            continue
        (i,), (k,) = into[node], out[node]
        state.eliminate(node)
        out[i] = (out[i] - {node}) | {k}
        into[k] = (into[k] - {node}) | {i}
        queue += [i, k]
    return state


def eliminate_all(state: Elimination, most_entries: float) -> bool:
    """Eliminates nodes, those with the smallest table first, as long as tables are small; whether none is left."""
    queue = [(state.size(i), i) for i in state.costs]
    heapq.heapify(queue)
    while queue:
        size, node = heapq.heappop(queue)
        if node not in state.costs:
            continue
        if (now := state.size(node)) != size:
            heapq.heappush(queue, (now, node))
            continue
        if size > most_entries:
            return False
        near = state.neighbours(node)
        state.eliminate(node)
        for i in near:
            heapq.heappush(queue, (state.size(i), i))
    return True


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """The cheapest choice without regard to memory, by OptCNN's eliminations and variable elimination.

    `seconds` and `seed` have no effect: time and memory are bounded by the tables' size.

    Raises:
        ShardingError: a table would be too large, or the cheapest choice exceeds the limit.

    References:
        Jia, Lin, Qi, Aiken, "Exploring Hidden Dimensions in Parallelizing Convolutional Neural Networks", ICML 2018,
        section 5.2. Deviation: the residual graph is not enumerated but eliminated, too.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    state = optcnn(problem)
    if not eliminate_all(state, MOST_ENTRIES):
        size = min(state.size(i) for i in state.costs)
        found = f"{len(state.costs)} nodes left, the next table has {size:,} entries"
        required = f"tables of at most {MOST_ENTRIES:,} entries"
        raise ShardingError(f"optcnn: {problem!r}", found=found, required=required, fix='algorithm="auto"')
    by_node = state.choice()
    choice = np.array([by_node[i] for i in range(problem.num_nodes)], np.int64)
    if problem.cost(choice) >= FORBIDDEN:
        raise nothing_found(problem, "optcnn", is_proven=True)
    if not problem.is_feasible(choice):
        found = f"a peak of {problem.peak_bytes(choice):,.0f} bytes at the least cost"
        required = f"at most {problem.memory_bytes:,.0f} bytes; OptCNN does not see memory"
        fix = 'algorithm="auto" or memory_bytes=math.inf'
        raise ShardingError(f"optcnn: {problem!r}", found=found, required=required, fix=fix)
    return Solution(
        problem=problem,
        choice=choice,
        algorithm="optcnn",
        bound=problem.cost(choice),
        evaluations=sum(best.size for _, _, best in state.undo),
        seconds=time.monotonic() - start,
    )


def _expanded(table: np.ndarray, scope: Scope, axes: Scope) -> np.ndarray:
    """A table with its dims at the places of its nodes among `axes`."""
    order = sorted(range(len(scope)), key=lambda k: axes.index(scope[k]))
    lengths = dict(zip(scope, table.shape, strict=True))
    return table.transpose(order).reshape([lengths.get(i, 1) for i in axes])
