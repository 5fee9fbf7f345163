"""Best-fit packing of buffers into one heap, as XLA's heap simulator does it.

Buffers with disjoint lifetimes share bytes, but gaps make the heap larger than the peak of live bytes. XLA places
buffers one by one, each into the smallest gap among those live at the same time (openxla/xla, `service/heap_simulator`,
`GlobalDecreasingSizeBestFitHeap`), by decreasing size. It also tries decreasing lifetimes and takes the smaller heap,
which changes little.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Interval = tuple[int, int, int]
"""Bytes of a buffer, and the first and last instant of its lifetime."""

NEVER = np.iinfo(np.int64).max
ALIGNMENT = 64
"""Bytes; XLA:CPU aligns every buffer to this."""


def aligned(num_bytes: int) -> int:
    """The bytes that a buffer takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def block_bytes(intervals: Sequence[Interval]) -> int:
    """Bytes of the heap that holds buffers over time, where each in turn takes the smallest gap it fits.

    Quadratic in their number: half a second for 10,000.
    """
    intervals = sorted(intervals, key=lambda i: (-i[0], i[1] - i[2]))
    sizes, first, last = np.array(intervals, np.int64).reshape(-1, 3).T
    offsets = np.zeros(len(intervals), np.int64)
    for k in range(len(intervals)):
        overlapping = np.nonzero((first[:k] <= last[k]) & (last[:k] >= first[k]))[0]
        if not len(overlapping):
            continue
        begins, ends = offsets[overlapping], offsets[overlapping] + sizes[overlapping]
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        gaps = begins - np.concatenate([[0], ends[:-1]])
        best = np.argmin(np.where(gaps >= sizes[k], gaps, NEVER))
        offsets[k] = begins[best] - gaps[best] if gaps[best] >= sizes[k] else ends[-1]
    return int((offsets + sizes).max(initial=0))
