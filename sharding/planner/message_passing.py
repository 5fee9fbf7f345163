"""Sequential tree-reweighted message passing: a lower bound, and a choice guided by it.

Messages move costs between nodes and edges without changing any choice's cost. With `m[u, s]` the message of u to s,

    h_s(p) = c_s(p) + sum_u m[u, s](p),
    m[s, t](q) = min_p [w_s h_s(p) - m[t, s](p) + e_st(p, q)] - constant,

where `1 / w_s` is the larger of the numbers of neighbours before and after s. The constants and the least of each h_s,
taken on the way back, add up to a bound that no choice is below. Nodes are in a random order; those that don't depend
on each other in it are processed together.

Reference: Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", IEEE Transactions on
Pattern Analysis and Machine Intelligence 28 (2006), section 4.
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
    share: np.ndarray
    """Part of its node's total that a message carries, per arc."""
    sender: np.ndarray
    """The source among the nodes of the level, per arc."""


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
        ahead = np.bincount(arcs.source[later], minlength=n)
        weight = 1.0 / np.maximum(1, np.maximum(ahead, np.bincount(arcs.source[~later], minlength=n)))
        levels = [np.flatnonzero(depth == d) for d in range(int(depth.max(initial=-1)) + 1)]
        by_depth = [np.flatnonzero(depth[arcs.source] == d) for d in range(len(levels))]
        forward = [ids[later[ids]] for ids in by_depth]
        backward = [ids[~later[ids]] for ids in by_depth]
        self._forward = [self._sends(nodes, ids, weight) for nodes, ids in zip(levels, forward, strict=True)]
        self._backward = [self._sends(nodes, ids, weight) for nodes, ids in zip(levels, backward, strict=True)][::-1]
        self._rounding = [
            (Segments.of(arcs, nodes), Rows.of(arcs, ids, arcs.start[ids]))
            for nodes, ids in zip(levels, backward, strict=True)
        ]
        self._from_later = np.repeat(~later, received)

    def _sends(self, nodes: np.ndarray, ids: np.ndarray, weight: np.ndarray) -> _Sends:
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
            share=weight[arcs.source[ids]],
            sender=np.searchsorted(nodes, arcs.source[ids]),
        )

    def totals(self, costs: np.ndarray) -> np.ndarray:
        """Node costs with all received messages."""
        return costs + np.bincount(self._column, self.values, len(costs))

    def run(self, costs: np.ndarray) -> float:
        """One pass through the order and back, for node costs [all strategies]; returns the bound."""
        total = self.totals(costs)
        for send in self._forward:
            self._send(send, total)
        least = 0.0
        for send, (segments, _) in zip(self._backward, reversed(self._rounding), strict=True):
            smallest = np.minimum.reduceat(total[segments.columns], segments.starts)
            least += float(smallest.sum()) - float((send.share * smallest[send.sender]).sum())
            least += self._send(send, total)
        return least

    def _send(self, send: _Sends, total: np.ndarray) -> float:
        """Sends the messages of a level in one direction; returns what is taken off them so that their least is 0."""
        if not len(send.entries):
            return 0.0
        own = send.weight * total[send.source] - self.values[send.reply]
        values = own[send.spread]
        values += send.entries
        new = np.minimum.reduceat(values, send.starts)
        least = np.minimum.reduceat(new, send.first)
        new -= np.repeat(least, send.counts)
        np.add.at(total, send.target, new - self.values[send.places])
        self.values[send.places] = new
        return float(least.sum())

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
