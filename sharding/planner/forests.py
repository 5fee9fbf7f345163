"""Exact minimisation over a forest of nodes while the others keep their strategies, all trees of it at once.

A forest is a set of nodes whose edges among each other form no cycle. Given the rest, its best strategies follow by
dynamic programming from the leaves to the roots and back. Trees are processed level by level, each level as a few array
operations over all strategies of its nodes, end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .problem import Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class Arcs:
    """Each edge in both directions, with costs by the target's strategy, then the source's."""

    source: np.ndarray
    target: np.ndarray
    start: np.ndarray
    """First entry of an arc's matrix in `values`."""
    values: np.ndarray
    by_source: np.ndarray
    """Arcs in order of their source, and where each node's begin."""
    first: np.ndarray
    sizes: np.ndarray
    """Strategies of each node."""
    offsets: np.ndarray
    """First strategy of each node, and the number of all strategies."""

    @classmethod
    def of(cls, problem: Problem) -> Arcs:
        """The arcs of a problem."""
        distinct = {id(matrix): matrix for matrix in problem.edge_costs}
        sizes = [matrix.size for matrix in distinct.values()]
        at = dict(zip(distinct, np.cumsum([0, *sizes])[:-1], strict=True))
        forward = [matrix.T.ravel() for matrix in distinct.values()]
        backward = [matrix.ravel() for matrix in distinct.values()]
        start = np.array([at[id(matrix)] for matrix in problem.edge_costs], np.int64)
        source = np.concatenate([problem.edges[:, 0], problem.edges[:, 1]])
        order = np.argsort(source, kind="stable")
        return cls(
            source=source,
            target=np.concatenate([problem.edges[:, 1], problem.edges[:, 0]]),
            start=np.concatenate([start, start + sum(sizes)]),
            values=np.concatenate([*forward, *backward, np.zeros(0)]),
            by_source=order,
            first=np.searchsorted(source[order], np.arange(problem.num_nodes + 1)),
            sizes=problem.num_strategies,
            offsets=problem.flat.offsets,
        )


class Rows(NamedTuple):
    """For some arcs, their costs by the source's strategy once the target's is known."""

    target: np.ndarray
    """Of the arc, per entry."""
    stride: np.ndarray
    entry: np.ndarray
    """In the matrix's first row."""
    column: np.ndarray
    """The source's strategy."""

    @classmethod
    def of(cls, arcs: Arcs, chosen: np.ndarray, start: np.ndarray) -> Rows:
        """The rows of chosen arcs whose matrices start at `start`."""
        source = arcs.source[chosen]
        count = arcs.sizes[source]
        inner = ranges(count)
        return cls(
            np.repeat(arcs.target[chosen], count),
            np.repeat(count, count),
            np.repeat(start, count) + inner,
            np.repeat(arcs.offsets[source], count) + inner,
        )

    def of_choice(self, values: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """The entries, given every target's strategy."""
        return values[self.entry + choice[self.target] * self.stride]


class Segments(NamedTuple):
    """The strategies of some nodes end to end."""

    nodes: np.ndarray
    columns: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    back: np.ndarray
    """How many strategies of its node follow, with itself."""

    @classmethod
    def of(cls, arcs: Arcs, nodes: np.ndarray) -> Segments:
        """The strategies of `nodes`."""
        counts = arcs.sizes[nodes]
        inner = ranges(counts)
        starts = np.cumsum(counts) - counts
        return cls(
            nodes, np.repeat(arcs.offsets[nodes], counts) + inner, starts, counts, np.repeat(counts, counts) - inner
        )

    def argmin(self, values: np.ndarray) -> np.ndarray:
        """The first strategy of least value of each node."""
        least = np.repeat(np.minimum.reduceat(values, self.starts), self.counts)
        return self.counts - np.maximum.reduceat(np.where(values <= least, self.back, 0), self.starts)


class Level(NamedTuple):
    """Nodes at one depth and the arcs to their parents."""

    entries: np.ndarray
    """Matrices of the arcs, by the parent's strategy, then the child's."""
    child: np.ndarray
    """Strategy of the child, per entry."""
    starts: np.ndarray
    """First entry of each of the parents' strategies."""
    parent: np.ndarray
    """Strategy of the parent, per start."""
    rows: Rows
    segments: Segments
    parents: np.ndarray
    """Of the nodes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Forest:
    """A set of nodes without cycles, ready for `minimise`."""

    arcs: Arcs
    rows: Rows
    """Of arcs from the forest to other nodes."""
    roots: Segments
    levels: list[Level]
    """The deepest first."""
    tree: np.ndarray
    """The root of each node's tree; -1 outside the forest."""

    def minimise(self, costs: np.ndarray, choice: np.ndarray) -> None:
        """Gives the forest's nodes their best strategies in place, for node costs [all strategies]."""
        around = self.rows.of_choice(self.arcs.values, choice)
        total = costs + np.bincount(self.rows.column, around, len(costs))
        for level in self.levels:
            values = total[level.child]
            values += level.entries
            np.add.at(total, level.parent, np.minimum.reduceat(values, level.starts))
        choice[self.roots.nodes] = self.roots.argmin(total[self.roots.columns])
        for level in reversed(self.levels):
            values = level.rows.of_choice(level.entries, choice)
            values += total[level.segments.columns]
            choice[level.segments.nodes] = level.segments.argmin(values)


def random_forest(arcs: Arcs, rng: np.random.Generator, *, largest: int) -> Forest:
    """A forest that no node can join, grown in random order; trees have at most `largest` nodes."""
    n = len(arcs.sizes)
    neighbours = arcs.target[arcs.by_source].tolist()
    first = arcs.first.tolist()
    tree, members = [-1] * n, [1] * n
    for node in rng.permutation(n).tolist():
        roots: list[int] = []
        for k in range(first[node], first[node + 1]):
            root = neighbours[k]
            if tree[root] < 0:
                continue
            while tree[root] != root:
                tree[root] = tree[tree[root]]
                root = tree[root]
            roots.append(root)
        size = 1 + sum(members[root] for root in roots)
        if len(set(roots)) < len(roots) or (size > largest and roots):
            continue
        tree[node], members[node] = node, size
        for root in roots:
            tree[root] = node
    return forest_of(arcs, np.array(tree) >= 0)


def forest_of(arcs: Arcs, inside: np.ndarray) -> Forest:
    """The forest of nodes that are `inside`, each tree rooted in its middle by removing leaves again and again."""
    within = inside[arcs.source] & inside[arcs.target]
    degree = np.bincount(arcs.source[within], minlength=len(inside))
    left, levels, removed = inside.copy(), [], np.zeros(len(inside), bool)
    ids = np.flatnonzero(within)
    while True:
        leaves = left & (degree == 1)
        chosen = ids[leaves[arcs.source[ids]]]
        # Of two leaves that are each other's parent, one becomes the root.
        chosen = chosen[~leaves[arcs.target[chosen]] | (arcs.source[chosen] < arcs.target[chosen])]
        if not len(chosen):
            break
        levels.append(_level(arcs, chosen))
        gone = arcs.source[chosen]
        left[gone], removed[gone] = False, True
        degree -= np.bincount(arcs.target[chosen], minlength=len(degree))
        ids = ids[~removed[arcs.source[ids]] & ~removed[arcs.target[ids]]]
    tree = np.where(left, np.arange(len(left)), -1)
    for level in reversed(levels):
        tree[level.segments.nodes] = tree[level.parents]
    outward = np.flatnonzero(inside[arcs.source] & ~inside[arcs.target])
    return Forest(
        arcs=arcs,
        rows=Rows.of(arcs, outward, arcs.start[outward]),
        roots=Segments.of(arcs, np.flatnonzero(left)),
        levels=levels,
        tree=tree,
    )


def _level(arcs: Arcs, chosen: np.ndarray) -> Level:
    source, target = arcs.source[chosen], arcs.target[chosen]
    inner, outer = arcs.sizes[source], arcs.sizes[target]
    counts = inner * outer
    start = np.cumsum(counts) - counts
    at = ranges(counts)
    lengths = np.repeat(inner, outer)
    return Level(
        entries=arcs.values[np.repeat(arcs.start[chosen], counts) + at],
        child=np.repeat(arcs.offsets[source], counts) + at % np.repeat(inner, counts),
        starts=np.cumsum(lengths) - lengths,
        parent=np.repeat(arcs.offsets[target], outer) + ranges(outer),
        rows=Rows.of(arcs, chosen, start),
        segments=Segments.of(arcs, source),
        parents=target,
    )


def ranges(counts: np.ndarray) -> np.ndarray:
    """`arange(count)` of each count, end to end."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
