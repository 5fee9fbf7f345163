"""A choice that is made one node after the other, and what each decision leaves to the nodes that are undecided.

Decisions that searches share: only strategies that still fit are options, those that no other one is worse than are
dropped, and a node with one option left is decided. So every complete choice is within the memory limit, and nothing
that is dropped is part of the only best choice.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterable

import numpy as np

from .problem import FORBIDDEN, Problem

MOST_COMPARISONS = 20_000
"""Entries of edges up to which the strategies of a node are compared with each other."""


class PartialChoice:
    """Some nodes' strategies, and the others' options.

    Strategies that no choice may take cost inf here, so that sums with them stay so.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.edges = joined_edges(problem)
        """Per node, (neighbour, costs [own strategies, neighbour's], whether some are inf); parallel edges added up."""
        flat = problem.flat
        self.offsets = flat.offsets
        self.choice = np.full(problem.num_nodes, -1, np.int64)
        """-1 where undecided."""
        self.cost = 0.0
        """Of the decided nodes and the edges between them; inf if nothing can complete the choice."""
        self.local = np.where(flat.costs >= FORBIDDEN, np.inf, flat.costs)
        """What each strategy adds: its own cost and its edges to decided nodes."""
        self.allowed = np.isfinite(self.local)
        self.room = problem.memory_bytes - problem.memory_over_time([int(usage.argmin()) for usage in problem.usages])
        """Bytes left at each time if undecided nodes take their smallest strategy."""
        self.extra = _extra_bytes(problem)
        """Bytes of each strategy above its node's smallest; 0 where no choice exceeds the limit."""
        self.num_open = np.array([len({j for j, _, _ in own}) for own in self.edges], np.int64)
        """Undecided neighbours of each node."""
        self.least_extra = np.zeros(problem.num_nodes)
        """Bytes that an undecided node needs above its smallest strategy."""
        self.reserved = np.zeros(len(self.room))
        """The sum of those bytes at each time."""
        self.num_alive = np.zeros(len(self.room), np.int64)
        """Undecided nodes at each time."""
        for first, end in problem.spans.tolist():
            self.num_alive[first:end] += 1

    def copied(self) -> PartialChoice:
        """The same decisions, to be continued differently."""
        other = copy.copy(self)
        for name in ("choice", "local", "allowed", "room", "num_open", "least_extra", "reserved", "num_alive"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def forced(self, node: int, strategy: int) -> PartialChoice:
        """A copy in which a node has one of its options, and what that forces; dead if a node is left without."""
        other = self.copied()
        other.decide(node, strategy)
        other.force([j for j, _, _ in self.edges[node]])
        return other

    @property
    def is_dead(self) -> bool:
        """Whether nothing can complete it."""
        return self.cost == np.inf

    def options(self, node: int) -> np.ndarray:
        """Strategies that an undecided node may still take."""
        own = slice(self.offsets[node], self.offsets[node + 1])
        first, end = self.problem.spans[node]
        room = (self.room[first:end] - self.reserved[first:end]).min(initial=np.inf) + self.least_extra[node]
        return np.flatnonzero(self.allowed[own] & np.isfinite(self.local[own]) & (self.extra[own] <= room))

    def added_costs(self, node: int) -> np.ndarray:
        """What each strategy of a node adds to the cost: edges to undecided nodes count with their least."""
        total = self.local[self.offsets[node] : self.offsets[node + 1]].copy()
        for j, matrix, _ in self.edges[node]:
            if self.choice[j] < 0:
                total += matrix.min(axis=1)
        return total

    def decide(self, node: int, strategy: int) -> None:
        """Gives a node one of its options."""
        at = self.offsets[node] + strategy
        self.cost += float(self.local[at])
        self.choice[node] = strategy
        first, end = self.problem.spans[node]
        self.room[first:end] -= self.extra[at]
        self.reserved[first:end] -= self.least_extra[node]
        self.num_alive[first:end] -= 1
        for j, matrix, _ in self.edges[node]:
            self.num_open[j] -= 1
            if self.choice[j] < 0:
                self.local[self.offsets[j] : self.offsets[j + 1]] += matrix[strategy]

    def force(self, nodes: Iterable[int]) -> None:
        """Decides nodes with one option left, from these on: other pairs are forbidden or exceed the limit."""
        self._follow(nodes, lambda _, options: np.ones(len(options), bool))

    def propagate(self, nodes: Iterable[int]) -> None:
        """Drops options that are never needed, too, and so decides more nodes."""
        self._follow(nodes, self._needed)

    def _follow(self, nodes: Iterable[int], select: Callable[[int, np.ndarray], np.ndarray]) -> None:
        queue = list(dict.fromkeys(nodes))
        while queue and not self.is_dead:
            node = queue.pop()
            if self.choice[node] >= 0:
                continue
            options = self.options(node)
            kept = options[select(node, options)]
            if not len(kept):
                self.cost = np.inf
                return
            self._narrow(node, kept, queue)
            if len(kept) == 1 and not self.is_dead:
                self.decide(node, int(kept[0]))
                queue += [j for j, _, _ in self.edges[node] if self.choice[j] < 0]

    def _narrow(self, node: int, kept: np.ndarray, queue: list[int]) -> None:
        """Keeps some options of a node, and those of its neighbours that go with one of them."""
        self.allowed[self.offsets[node] : self.offsets[node + 1]] = False
        self.allowed[self.offsets[node] + kept] = True
        needed = self.extra[self.offsets[node] + kept].min()
        if needed > self.least_extra[node]:
            first, end = self.problem.spans[node]
            self.reserved[first:end] += needed - self.least_extra[node]
            self.least_extra[node] = needed
            if (self.reserved[first:end] > self.room[first:end]).any():
                self.cost = np.inf
        for j, matrix, has_forbidden in self.edges[node]:
            if has_forbidden and self.choice[j] < 0:
                own = self.allowed[self.offsets[j] : self.offsets[j + 1]]
                lost = own & ~np.isfinite(matrix[kept]).any(axis=0)
                if lost.any():
                    own &= ~lost
                    queue.append(j)

    def _needed(self, node: int, options: np.ndarray) -> np.ndarray:
        """Which options are better than each other one for some strategies of the undecided nodes.

        Option p makes q needless if it takes no more memory and, whatever its neighbours do, costs no more:
        `local[p] - local[q] + sum over undecided j of max_r (e[p, r] - e[q, r]) <= 0`.
        """
        edges = [(j, matrix) for j, matrix, _ in self.edges[node] if self.choice[j] < 0]
        needed = np.ones(len(options), bool)
        if len(options) < 2:
            return needed
        if len(options) ** 2 * sum(matrix.shape[1] for _, matrix in edges) > MOST_COMPARISONS:
            return needed
        own = self.offsets[node] + options
        worse = self.local[own][:, None] - self.local[own]
        for j, matrix in edges:
            rows = matrix[options][:, self.allowed[self.offsets[j] : self.offsets[j + 1]]]
            with np.errstate(invalid="ignore"):
                difference = rows[:, None] - rows
                # Where q is forbidden nothing counts against p.
                difference[:, ~np.isfinite(rows)] = -np.inf
                worse += difference.max(axis=2, initial=-np.inf)
        better = (worse <= 0) & (self.extra[own][:, None] <= self.extra[own])
        # Of equals the first stays.
        better &= ~(better.T & np.tri(len(options), dtype=bool))
        return np.logical_not(better.any(axis=0))

    def signature(self) -> bytes:
        """Equal for choices whose undecided nodes face the same costs and limits."""
        seen = np.where((self.choice >= 0) & (self.num_open == 0), -2, self.choice)
        return seen.tobytes() + np.where(self.num_alive > 0, self.room, 0.0).tobytes()


def joined_edges(problem: Problem) -> list[list[tuple[int, np.ndarray, bool]]]:
    """Per node, (neighbour, costs by own and neighbour's strategy, whether some are inf); parallel edges added up."""
    joined: dict[tuple[int, int], np.ndarray] = {}
    open_costs: dict[int, np.ndarray] = {}
    for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
        if id(matrix) not in open_costs:
            open_costs[id(matrix)] = np.where(matrix >= FORBIDDEN, np.inf, matrix)
        own = open_costs[id(matrix)]
        key, oriented = ((i, j), own) if i < j else ((j, i), own.T)
        joined[key] = joined[key] + oriented if key in joined else oriented
    edges: list[list[tuple[int, np.ndarray, bool]]] = [[] for _ in range(problem.num_nodes)]
    for (i, j), matrix in joined.items():
        has_forbidden = not np.isfinite(matrix).all()
        edges[i].append((j, matrix, has_forbidden))
        edges[j].append((i, matrix.T, has_forbidden))
    return edges


def decision_order(problem: Problem) -> list[int]:
    """Nodes, each with as many decided neighbours as possible, then those whose strategies differ most in cost."""
    edges = joined_edges(problem)
    weight = [
        _spread(cost) + sum(_spread(matrix) for _, matrix, _ in own)
        for cost, own in zip(problem.costs, edges, strict=True)
    ]
    decided = [0] * problem.num_nodes
    heap = [(0, -w, i) for i, w in enumerate(weight)]
    heapq.heapify(heap)
    order = []
    while heap:
        count, _, node = heapq.heappop(heap)
        if -count != decided[node]:
            continue
        decided[node] = -1
        order.append(node)
        for j, _, _ in edges[node]:
            if decided[j] >= 0:
                decided[j] += 1
                heapq.heappush(heap, (-decided[j], -weight[j], j))
    return order


def _spread(costs: np.ndarray) -> float:
    """By how much the largest cost that is allowed exceeds the least."""
    finite = costs[costs < FORBIDDEN]
    return float(np.ptp(finite)) if finite.size else 0.0


def _extra_bytes(problem: Problem) -> np.ndarray:
    """Bytes of each strategy above its node's smallest, 0 for nodes that only live when everything fits."""
    extra = [
        (usage - usage.min()) * problem.is_tight[first:end].any()
        for usage, (first, end) in zip(problem.usages, problem.spans, strict=True)
    ]
    return np.concatenate([*extra, np.zeros(0)])
