"""Memory over time of a reduced problem, for all nodes at once.

Only the times at which some choice exceeds the limit count. Consecutive ones with the same parts alive are one, with
the smallest limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .forests import ranges
from .problem_reduction import Part


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveMemory:
    """Parts of memory, their usages end to end, and what is left for them at each time."""

    node: np.ndarray
    first: np.ndarray
    end: np.ndarray
    """Indices of times; without the end."""
    offset: np.ndarray
    """First entry of each part in `usages`."""
    usages: np.ndarray
    column: np.ndarray
    """The strategy among those of all nodes, per entry of `usages`."""
    part: np.ndarray
    """The part, per entry of `usages`."""
    limit: np.ndarray
    """Bytes, per time."""
    by_node: list[np.ndarray]
    """Parts of each node."""

    @classmethod
    def of(cls, parts: Sequence[Sequence[Part]], offsets: np.ndarray, limit: np.ndarray) -> LiveMemory:
        """The memory of nodes' parts within what is left at each time, [times]."""
        flat = [(i, part) for i, own in enumerate(parts) for part in own]
        first = np.array([part.first for _, part in flat], np.int64)
        end = np.array([part.end for _, part in flat], np.int64)
        most = np.array([part.usages.max() for _, part in flat])
        times = _binding(first, end, most, limit)
        new, limits = _compressed(first, end, times, limit)
        first, end = new[first], new[end]
        kept = np.flatnonzero(first < end)
        node = np.array([i for i, _ in flat], np.int64)[kept]
        usages = [flat[k][1].usages for k in kept]
        counts = np.array([len(u) for u in usages], np.int64)
        return cls(
            node=node,
            first=first[kept],
            end=end[kept],
            offset=np.cumsum(counts) - counts,
            usages=np.concatenate([np.zeros(0), *usages]),
            column=np.repeat(offsets[node], counts) + ranges(counts),
            part=np.repeat(np.arange(len(kept)), counts),
            limit=limits,
            by_node=np.split(np.arange(len(kept)), np.searchsorted(node, np.arange(1, len(parts)))),
        )

    def used(self, choice: np.ndarray) -> np.ndarray:
        """Bytes at each time."""
        bytes_ = self.usages[self.offset + choice[self.node]]
        size = len(self.limit) + 1
        return np.cumsum(np.bincount(self.first, bytes_, size) - np.bincount(self.end, bytes_, size))[:-1]

    def prices(self, multipliers: np.ndarray, num_strategies: int) -> np.ndarray:
        """What each strategy of all nodes pays for its memory, at a price per byte at each time."""
        paid = np.concatenate([[0.0], np.cumsum(multipliers)])
        return np.bincount(self.column, (paid[self.end] - paid[self.first])[self.part] * self.usages, num_strategies)


def _binding(first: np.ndarray, end: np.ndarray, most: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Times at which the parts' largest usages exceed the limit."""
    size = len(limit) + 1
    return np.cumsum(np.bincount(first, most, size) - np.bincount(end, most, size))[:-1] > limit


def _compressed(
    first: np.ndarray, end: np.ndarray, times: np.ndarray, limit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each time, the number of groups of `times` before it; and the least limit of each group."""
    changes = np.zeros(len(limit) + 1, bool)
    changes[first] = changes[end] = True
    run = np.cumsum(changes[:-1])
    chosen = np.flatnonzero(times)
    starts = np.flatnonzero(np.diff(run[chosen], prepend=-1))
    limits = np.minimum.reduceat(limit[chosen], starts) if len(chosen) else np.zeros(0)
    before = np.zeros(len(limit) + 1, np.int64)
    before[chosen[starts] + 1] = 1
    return np.cumsum(before), limits
