"""Best-fit packing of buffers into one heap, as XLA's heap simulator does it.

Buffers with disjoint lifetimes share bytes, but fragmentation makes the heap larger than the peak of live bytes. XLA
places buffers one by one, each into the smallest gap among those live at the same time (openxla/xla,
`service/heap_simulator`, `GlobalDecreasingSizeBestFitHeap`), once by decreasing size and once by decreasing lifetime,
and takes the smaller heap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Interval = tuple[int, int, int]
"""Bytes of a buffer, and the first and last instant of its lifetime."""

ALIGNMENT = 64
"""Bytes; XLA:CPU aligns every buffer to this."""


def aligned(num_bytes: int) -> int:
    """The bytes that a buffer takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def block_bytes(intervals: Sequence[Interval]) -> int:
    """Bytes of the heap that holds buffers over time.

    Quadratic in their number: a second for 10,000.
    """
    by_size = sorted(intervals, key=lambda i: (-i[0], i[1] - i[2]))
    by_time = sorted(intervals, key=lambda i: (i[1] - i[2], -i[0]))
    return min(_best_fit_bytes(by_size), _best_fit_bytes(by_time))


def _best_fit_bytes(intervals: Sequence[Interval]) -> int:
    """Bytes of the heap when each buffer in turn takes the smallest gap it fits."""
    sizes, first, last = (
        (np.array(column, np.int64) for column in zip(*intervals, strict=True)) if intervals else ([], [], [])
    )
    offsets = np.zeros(len(intervals), np.int64)
    for k in range(len(intervals)):
        overlapping = np.nonzero((first[:k] <= last[k]) & (last[:k] >= first[k]))[0]
        if not len(overlapping):
            continue
        begins, ends = offsets[overlapping], offsets[overlapping] + sizes[overlapping]
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
