"""Reductions that keep an optimal choice: most of a large problem is decided, tied or dominated.

- A strategy is removed if it is forbidden, or if another one costs no more whatever the neighbours take and uses no
  more memory (`_dominated`; Goldstein's criterion of dead-end elimination).
- A node with one strategy becomes part of its neighbours' costs.
- A node whose strategy follows from a neighbour's, because all other pairs are forbidden, is merged into it.
- Parallel edges are added up; an edge whose costs are a sum over its two nodes becomes node costs.
- A node whose memory doesn't depend on its strategy is eliminated if it has at most two neighbours.

A merged node has a part of memory for each lifetime.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .problem import FORBIDDEN, Problem

MOST_ENTRIES = 1_000_000
"""Entries of a table by which a node is eliminated."""
MOST_COMPARISONS = 10_000_000
"""Entries compared to find a node's dominated strategies."""


class Part(NamedTuple):
    """Memory of a node during one lifetime: usage of each strategy beyond the smallest."""

    first: int
    end: int
    usages: np.ndarray


class Reduction:
    """A problem's nodes, edges and memory, made smaller step by step, and the way back."""

    def __init__(
        self,
        costs: Sequence[np.ndarray],
        edges: Iterable[tuple[int, int, np.ndarray]],
        parts: Iterable[tuple[int, Part]],
        limit: np.ndarray,
    ):
        """Starts from node costs, (node, node, matrix), (node, part of its memory), and the limit at each time."""
        self.costs = dict(enumerate(costs))
        self.edges: dict[int, dict[int, np.ndarray]] = {i: {} for i in self.costs}
        """Matrix to each neighbour, by the node's own strategy first; both directions."""
        self.parts: dict[int, list[Part]] = {i: [] for i in self.costs}
        self.constant = 0.0
        self.used = np.zeros(len(limit) + 1)
        """Change of the memory that does not depend on the choice, at each time."""
        self._limit = limit
        self._undo: list[Callable[[np.ndarray], None]] = []
        self._queue: dict[int, None] = dict.fromkeys(self.costs)
        self._num_nodes = len(costs)
        for node, part in parts:
            self._add_part(node, *part)
        for i, j, matrix in edges:
            self._add_edge(i, j, matrix)

    @classmethod
    def of(cls, problem: Problem) -> Reduction:
        """The reduction of a problem, not yet reduced; memory counts where some choice exceeds the limit."""
        exceeded = np.concatenate([[0], np.cumsum(problem.is_tight)])
        counted = exceeded[problem.spans[:, 0]] < exceeded[problem.spans[:, 1]]
        spans = zip(problem.spans.tolist(), problem.usages, strict=True)
        parts = ((i, Part(a, b, usage)) for i, ((a, b), usage) in enumerate(spans) if counted[i])
        edges = ((i, j, m) for (i, j), m in zip(problem.edges.tolist(), problem.edge_costs, strict=True))
        return cls(problem.costs, edges, parts, np.full(len(problem.times), problem.memory_bytes))

    @property
    def limit(self) -> np.ndarray:
        """What is left for the parts at each time."""
        return self._limit - np.cumsum(self.used)[:-1]

    def keep(self, node: int, strategies: np.ndarray) -> None:
        """Allows a node only some of its strategies, sorted; before `run`."""
        mask = np.zeros(len(self.costs[node]), bool)
        mask[strategies] = True
        self._select(node, mask)

    def run(self, until: float = math.inf) -> None:
        """Reduces until nothing changes, or until a time of `time.monotonic`."""
        while self._queue and time.monotonic() < until:
            node = next(iter(self._queue))
            del self._queue[node]
            if node in self.costs:
                self._reduce(node)

    def restore(self, choice: dict[int, int]) -> np.ndarray:
        """A choice of the problem from the strategies of the nodes that are left."""
        x = np.zeros(self._num_nodes, np.int64)
        for node, strategy in choice.items():
            x[node] = strategy
        for step in reversed(self._undo):
            step(x)
        return x

    def _reduce(self, node: int) -> None:
        self._select(node, ~self._forbidden(node))
        for other in list(self.edges[node]):
            self._separate(node, other)
        if len(self.costs[node]) > 1:
            self._select(node, ~self._dominated(node))
        if len(self.costs[node]) == 1:
            self._fix(node)
        elif not self.parts[node] and len(self.edges[node]) <= 2 and self._table_size(node) <= MOST_ENTRIES:
            self._eliminate(node)
        else:
            self._merge_tied(node)

    def _table_size(self, node: int) -> int:
        return int(np.prod([len(self.costs[i]) for i in (node, *self.edges[node])]))

    def _forbidden(self, node: int) -> np.ndarray:
        bad = self.costs[node] >= FORBIDDEN
        for matrix in self.edges[node].values():
            bad = bad | (matrix.min(axis=1) >= FORBIDDEN)
        # If all are forbidden, one stays, and the choice's cost tells.
        return bad if not bad.all() else np.arange(len(bad)) > 0

    def _dominated(self, node: int) -> np.ndarray:
        """Strategies for which another one is at least as good."""
        count = len(self.costs[node])
        if count**2 * sum(len(self.costs[i]) for i in self.edges[node]) > MOST_COMPARISONS:
            return np.zeros(count, bool)
        more = self.costs[node][:, None] - self.costs[node][None, :]
        for matrix in self.edges[node].values():
            # A pair that is forbidden for the one is no loss for the other.
            own = np.where(matrix >= FORBIDDEN, np.inf, matrix)
            more = more + (own[:, None, :] - matrix[None, :, :]).min(axis=2)
        better = more >= 0
        for part in self.parts[node]:
            better &= part.usages[:, None] >= part.usages[None, :]
        left = np.ones(count, bool)
        for p in reversed(range(count)):
            left[p] = False
            left[p] = not (better[p] & left).any()
        return ~left

    def _select(self, node: int, keep: np.ndarray) -> None:
        if keep.all():
            return
        kept = np.flatnonzero(keep)
        self.costs[node] = self.costs[node][kept]
        for other, matrix in self.edges[node].items():
            self._set(node, other, matrix[kept])
        parts, self.parts[node] = self.parts[node], []
        for part in parts:
            self._add_part(node, part.first, part.end, part.usages[kept])
        self._undo.append(lambda x: x.__setitem__(node, kept[x[node]]))
        self._touch(node)

    def _separate(self, node: int, other: int) -> None:
        """Moves the least cost of each strategy from an edge to its node, and drops an edge without costs."""
        matrix = self.edges[node][other]
        rows = matrix.min(axis=1)
        if (rows >= FORBIDDEN).any():
            return
        rest = np.where(matrix >= FORBIDDEN, FORBIDDEN, matrix - rows[:, None])
        columns = rest.min(axis=0)
        if not rows.any() and not columns.any() and rest.any():
            return
        if (columns >= FORBIDDEN).any():
            return
        rest = np.where(rest >= FORBIDDEN, FORBIDDEN, rest - columns[None, :])
        self.costs[node] = self.costs[node] + rows
        self.costs[other] = self.costs[other] + columns
        if rest.any():
            self._set(node, other, rest)
        else:
            self._drop(node, other)
            self._queue[other] = None

    def _fix(self, node: int) -> None:
        self.constant += float(self.costs[node][0])
        self._touch(node)
        for other, matrix in list(self.edges[node].items()):
            self.costs[other] = np.minimum(self.costs[other] + matrix[0], FORBIDDEN)
            self._drop(node, other)
        self._remove(node)

    def _eliminate(self, node: int) -> None:
        near = list(self.edges[node])
        matrices = [self.edges[node][i] for i in near]
        self._touch(node)
        for other in near:
            self._drop(node, other)
        total = self.costs[node].reshape(-1, *[1] * len(near))
        for k, matrix in enumerate(matrices):
            total = total + np.expand_dims(matrix, 2 - k if len(near) == 2 else ())
        best, least = total.argmin(axis=0), np.minimum(total.min(axis=0), FORBIDDEN)
        self._undo.append(lambda x: x.__setitem__(node, best[tuple(x[i] for i in near)]))
        if not near:
            self.constant += float(least)
        elif len(near) == 1:
            self.costs[near[0]] = np.minimum(self.costs[near[0]] + least, FORBIDDEN)
        else:
            self._add_edge(near[0], near[1], least)
        self._remove(node)

    def _merge_tied(self, node: int) -> None:
        """Merges this node into a neighbour that decides it, or such neighbours into this node."""
        for other, matrix in list(self.edges[node].items()):
            if other not in self.edges[node]:
                continue
            allowed = matrix < FORBIDDEN
            decides = (allowed.sum(axis=1) == 1).all()
            decided = (allowed.sum(axis=0) == 1).all()
            if decided and self._is_small(node, other) and (not decides or self._degree(node) <= self._degree(other)):
                self._merge(node, other, allowed.argmax(axis=0), matrix)
                return
            if decides and self._is_small(other, node):
                self._merge(other, node, allowed.argmax(axis=1), matrix.T)

    def _degree(self, node: int) -> int:
        return len(self.edges[node])

    def _is_small(self, gone: int, kept: int) -> bool:
        """Whether a merge doesn't blow up the matrices of the node that goes."""
        return len(self.costs[kept]) <= 2 * len(self.costs[gone]) or self._degree(gone) <= 3

    def _merge(self, gone: int, kept: int, follows: np.ndarray, matrix: np.ndarray) -> None:
        """Removes a node whose strategy is `follows[p]` if `kept` takes p; `matrix` is by the node's strategy first."""
        pair = matrix[follows, np.arange(len(follows))]
        self.costs[kept] = np.minimum(self.costs[kept] + self.costs[gone][follows] + pair, FORBIDDEN)
        self._touch(gone)
        self._drop(gone, kept)
        for other, edge in list(self.edges[gone].items()):
            self._drop(gone, other)
            self._add_edge(kept, other, edge[follows])
        for part in self.parts[gone]:
            self._add_part(kept, part.first, part.end, part.usages[follows])
        self._undo.append(lambda x: x.__setitem__(gone, follows[x[kept]]))
        self._remove(gone)
        self._queue[kept] = None

    def _add_part(self, node: int, first: int, end: int, usages: np.ndarray) -> None:
        least = usages.min()
        self.used[first] += least
        self.used[end] -= least
        if first >= end or not (usages > least).any():
            return
        same = [k for k, part in enumerate(self.parts[node]) if (part.first, part.end) == (first, end)]
        if same:
            known = self.parts[node].pop(same[0])
            self._add_part(node, first, end, known.usages + usages - least)
        else:
            self.parts[node].append(Part(first, end, usages - least))

    def _add_edge(self, node: int, other: int, matrix: np.ndarray) -> None:
        known = self.edges[node].get(other)
        self._set(node, other, matrix if known is None else np.minimum(known + matrix, FORBIDDEN))

    def _set(self, node: int, other: int, matrix: np.ndarray) -> None:
        self.edges[node][other] = matrix
        self.edges[other][node] = matrix.T

    def _drop(self, node: int, other: int) -> None:
        del self.edges[node][other], self.edges[other][node]

    def _touch(self, node: int) -> None:
        self._queue.update(dict.fromkeys(self.edges[node]))

    def _remove(self, node: int) -> None:
        del self.costs[node], self.edges[node], self.parts[node]
