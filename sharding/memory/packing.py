"""Where arrays lie in one block of memory, and how long the block is.

Arrays that are there at different times share bytes, but what one leaves free need not fit the next: the block is
longer than the most that is there at once. XLA places arrays one by one, each into the smallest gap between those
that are there with it (openxla/xla, `service/heap_simulator`, `GlobalDecreasingSizeBestFitHeap`), large ones first
and again long-lived ones first, and takes the shorter block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Interval = tuple[int, int, int]
"""Bytes, and the first and the last moment of an array."""


def placed(intervals: Sequence[Interval], places: Sequence[Interval]) -> set[int]:
    """Which arrays fit into places that are free at their time, as the memory of results is at first.

    Args:
        intervals: arrays over time.
        places: bytes of each place, and the first and the last moment at which it is taken.

    As XLA's buffer assignment does, large arrays first, each into the smallest place that holds it.
    """
    taken = [[place] for place in sorted(places)]
    found = set()
    for k in sorted(range(len(intervals)), key=lambda k: (-intervals[k][0], intervals[k][1])):
        num_bytes, first, last = intervals[k]
        for place in taken:
            if place[0][0] >= num_bytes and all(b < first or a > last for _, a, b in place):
                place.append(intervals[k])
                found.add(k)
                break
    return found


def block_bytes(intervals: Sequence[Interval]) -> int:
    """The length of the block that holds arrays over time, in bytes.

    The time grows with the square of their number: a second for 10,000.
    """
    by_size = sorted(intervals, key=lambda i: (-i[0], i[1] - i[2]))
    by_time = sorted(intervals, key=lambda i: (i[1] - i[2], -i[0]))
    return min(_placed(by_size), _placed(by_time))


def _placed(intervals: Sequence[Interval]) -> int:
    """The length of the block when each takes the smallest gap that is left to it."""
    sizes, first, last = (
        (np.array(column, np.int64) for column in zip(*intervals, strict=True)) if intervals else ([], [], [])
    )
    offsets = np.zeros(len(intervals), np.int64)
    for k in range(len(intervals)):
        meets = np.nonzero((first[:k] <= last[k]) & (last[:k] >= first[k]))[0]
        if not len(meets):
            continue
        begins, ends = offsets[meets], offsets[meets] + sizes[meets]
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        gaps = begins - np.concatenate([[0], ends[:-1]])
        fitting = np.nonzero(gaps >= sizes[k])[0]
        if len(fitting):
            best = fitting[np.argmin(gaps[fitting])]
            offsets[k] = begins[best] - gaps[best]
        else:
            offsets[k] = ends[-1]
    return int((offsets + sizes).max()) if len(intervals) else 0
