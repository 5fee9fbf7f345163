"""Sequential tree-reweighted message passing: a lower bound, and a choice guided by it.

Messages move costs between nodes and edges without changing any choice's cost. With `m[u, s]` the message of u to s,

    bound = sum_s min [c_s + sum_u m[u, s]] + sum_(s, t) min [e_st - m[t, s] - m[s, t]]

is below every choice's cost, and rises from pass to pass. Nodes are in a random order; those that don't depend on each
other in it are processed together.

Reference: Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", IEEE Transactions on Pattern
Analysis and Machine Intelligence 28 (2006), section 4.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .forests import Arcs, Rows, Segments, ranges


class _Sends(NamedTuple):
    """Messages that the nodes of one level send in one direction."""

    entries: np.ndarray
    """Matrices of the arcs, by the target's strategy, then the source's."""
    source: np.ndarray
    """Strategy of the source per arc, end to end; `weight` and `reply` belong to it."""
    weight: np.ndarray
    reply: np.ndarray
    """Place of the target's message to the source."""
    spread: np.ndarray
    """Where in `source` each entry's strategy is."""
    starts: np.ndarray
    """First entry of each of the targets' strategies."""
    places: slice | np.ndarray
    """Of the messages, per strategy of the target."""
    target: np.ndarray
    """Strategy of the target, per place."""
    first: np.ndarray
    counts: np.ndarray
    """Of each arc's message."""


class Messages:
    """Messages along all arcs of a problem."""

    def __init__(self, arcs: Arcs, rng: np.random.Generator):
        self.arcs = arcs
        received = arcs.sizes[arcs.target]
        self._first = np.cumsum(received) - received
        self.values = np.zeros(int(received.sum()))
        self._column = np.repeat(arcs.offsets[arcs.target], received) + ranges(received)
        order = rng.permutation(len(arcs.sizes))
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        later = position[arcs.source] < position[arcs.target]
        depth = _depths(arcs, later, order)
        num_arcs = len(arcs.source)
        self._reply = np.roll(np.arange(num_arcs), num_arcs // 2)
        n = len(arcs.sizes)
        forward = np.bincount(arcs.source[later], minlength=n)
        weight = 1.0 / np.maximum(1, np.maximum(forward, np.bincount(arcs.source[~later], minlength=n)))
        levels = [np.flatnonzero(depth == d) for d in range(int(depth.max(initial=-1)) + 1)]
        self._forward = [self._sends(np.flatnonzero(later & (depth[arcs.source] == d)), weight) for d in range(len(levels))]
        backward = [np.flatnonzero(~later & (depth[arcs.source] == d)) for d in range(len(levels))]
        self._backward = [self._sends(ids, weight) for ids in reversed(backward)]
        self._rounding = [
            (Segments.of(arcs, nodes), Rows.of(arcs, ids, arcs.start[ids]))
            for nodes, ids in zip(levels, backward, strict=True)
        ]
        self._from_later = np.repeat(~later, received)

    def _sends(self, ids: np.ndarray, weight: np.ndarray) -> _Sends:
        arcs = self.arcs
        inner, outer = arcs.sizes[arcs.source[ids]], arcs.sizes[arcs.target[ids]]
        counts, at = inner * outer, ranges(inner * outer)
        lengths = np.repeat(inner, outer)
        first = np.cumsum(outer) - outer
        return _Sends(
            entries=arcs.values[np.repeat(arcs.start[ids], counts) + at],
            source=np.repeat(arcs.offsets[arcs.source[ids]], inner) + ranges(inner),
            weight=np.repeat(weight[arcs.source[ids]], inner),
            reply=np.repeat(self._first[self._reply[ids]], inner) + ranges(inner),
            spread=np.repeat(np.cumsum(inner) - inner, counts) + at % np.repeat(inner, counts),
            starts=np.cumsum(lengths) - lengths,
            places=np.repeat(self._first[ids], outer) + ranges(outer),
            target=np.repeat(arcs.offsets[arcs.target[ids]], outer) + ranges(outer),
            first=first,
            counts=outer,
        )

    def totals(self, costs: np.ndarray) -> np.ndarray:
        """Node costs with all received messages."""
        return costs + np.bincount(self._column, self.values, len(costs))

    def run(self, costs: np.ndarray) -> None:
        """One pass through the order and back, for node costs [all strategies]."""
        total = self.totals(costs)
        for send in (*self._forward, *self._backward):
            if not len(send.entries):
                continue
            own = send.weight * total[send.source] - self.values[send.reply]
            values = own[send.spread]
            values += send.entries
            new = np.minimum.reduceat(values, send.starts)
            new -= np.repeat(np.minimum.reduceat(new, send.first), send.counts)
            np.add.at(total, send.target, new - self.values[send.places])
            self.values[send.places] = new

    def bound(self, costs: np.ndarray) -> float:
        """What no choice is below, for node costs [all strategies]."""
        least = float(np.minimum.reduceat(self.totals(costs), self.arcs.offsets[:-1]).sum())
        for send in self._forward:
            if len(send.entries):
                values = send.entries - self.values[send.reply][send.spread]
                rest = np.minimum.reduceat(values, send.starts) - self.values[send.places]
                least += float(np.minimum.reduceat(rest, send.first).sum())
        return least

    def choice(self, costs: np.ndarray) -> np.ndarray:
        """Each node's best strategy in order, given those before it and the messages of those after it."""
        kept = np.where(self._from_later, self.values, 0.0)
        total = costs + np.bincount(self._column, kept, len(costs))
        choice = np.zeros(len(self.arcs.sizes), np.int64)
        for segments, rows in self._rounding:
            np.add.at(total, rows.column, rows.of_choice(self.arcs.values, choice))
            choice[segments.nodes] = segments.argmin(total[segments.columns])
        return choice


def _depths(arcs: Arcs, later: np.ndarray, order: np.ndarray) -> np.ndarray:
    """For each node, the number of nodes on the longest path of ascending order that ends at it, without itself."""
    depth = [0] * len(arcs.sizes)
    sources, targets = arcs.source, arcs.target[arcs.by_source].tolist()
    ahead = later[arcs.by_source].tolist()
    first = np.searchsorted(sources[arcs.by_source], np.arange(len(depth) + 1)).tolist()
    for node in order.tolist():
        after = depth[node] + 1
        for k in range(first[node], first[node + 1]):
            if ahead[k] and depth[targets[k]] < after:
                depth[targets[k]] = after
    return np.array(depth, np.int64)
