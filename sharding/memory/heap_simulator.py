"""Best-fit packing of buffers into one heap, as XLA does it.

Buffers with disjoint lifetimes share bytes, but gaps make the heap larger than the peak of live bytes. XLA places
buffers one by one, each into the smallest gap among those live at the same time. On CPUs and GPUs it does so by
decreasing size (openxla/xla, `service/heap_simulator`, `GlobalDecreasingSizeBestFitHeap`); it also tries decreasing
lifetimes and takes the smaller heap, which changes little. On TPUs it does so in the order of the schedule.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

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


def online_bytes(intervals: Sequence[Interval]) -> int:
    """Bytes of the heap of XLA:TPU, which places buffers in the order of the schedule.

    Each takes the smallest gap that is large enough, or else the heap grows at its end. Gaps between buffers that live
    on stay, so the heap can be far larger than the peak of live bytes.
    """
    starts = sorted(range(len(intervals)), key=lambda k: intervals[k][1])
    ends = sorted(range(len(intervals)), key=lambda k: intervals[k][2])
    offsets, free, size = [0] * len(intervals), Gaps(), 0
    ended = 0
    for k in starts:
        num_bytes, first, _ = intervals[k]
        while intervals[ends[ended]][2] < first:
            free.add(offsets[ends[ended]], intervals[ends[ended]][0])
            ended += 1
        found = free.take(num_bytes)
        offsets[k] = free.take_last(size) if found is None else found
        size = max(size, offsets[k] + num_bytes)
    return size


class Gaps:
    """The free bytes of a heap."""

    def __init__(self) -> None:
        self.by_size: list[tuple[int, int]] = []
        """(bytes, offset), sorted."""
        self.ends: dict[int, int] = {}
        """Offset -> end."""
        self.begins: dict[int, int] = {}
        """End -> offset."""

    def take(self, num_bytes: int) -> int | None:
        """The offset of the smallest gap that is large enough, of which the rest stays free; None if none is."""
        at = bisect.bisect_left(self.by_size, (num_bytes, -1))
        if at == len(self.by_size):
            return None
        begin = self.by_size[at][1]
        end = self._remove(begin)
        if begin + num_bytes < end:
            self._insert(begin + num_bytes, end)
        return begin

    def take_last(self, size: int) -> int:
        """The offset of the gap at the end of a heap of some size, where it grows."""
        begin = self.begins.get(size, size)
        if begin < size:
            self._remove(begin)
        return begin

    def add(self, begin: int, num_bytes: int) -> None:
        """Frees bytes, and joins them with gaps beside them."""
        end = begin + num_bytes
        if end in self.ends:
            end = self._remove(end)
        if begin in self.begins:
            begin = self.begins[begin]
            self._remove(begin)
        self._insert(begin, end)

    def _insert(self, begin: int, end: int) -> None:
        self.ends[begin], self.begins[end] = end, begin
        bisect.insort(self.by_size, (end - begin, begin))

    def _remove(self, begin: int) -> int:
        end = self.ends.pop(begin)
        del self.begins[end]
        del self.by_size[bisect.bisect_left(self.by_size, (end - begin, begin))]
        return end


class Occupancy:
    """The steps at which each of many buffers is in use: a segment tree over steps of sets of buffers.

    Args:
        num_steps: of the program.
    """

    def __init__(self, num_steps: int):
        self.size = 1 << max(0, num_steps - 1).bit_length()
        self.always = [0] * (2 * self.size)
        """Node -> the buffers that are in use at all its steps and were added there, as bits."""
        self.ever = [0] * (2 * self.size)
        """Node -> those that are in use at some of its steps."""

    def add(self, buffer: int, first: int, last: int) -> None:
        """Adds steps, the last one included, at which a buffer is in use."""
        bit = 1 << buffer
        for node in self._parts(first, last):
            self.always[node] |= bit
        for node in self._around(first, last):
            self.ever[node] |= bit

    def used(self, first: int, last: int) -> int:
        """The buffers that are in use at some of these steps, as bits."""
        found = 0
        for node in self._parts(first, last):
            found |= self.ever[node]
        for node in self._around(first, last):
            found |= self.always[node]
        return found

    def first_free(self, start: int, first: int, last: int) -> int:
        """The first buffer, from a number on, that is free at all of these steps."""
        free = ~self.used(first, last) >> start
        return start + (free & -free).bit_length() - 1

    def is_free(self, buffer: int, first: int, last: int) -> bool:
        """Whether a buffer is free at all of these steps."""
        return not self.used(first, last) >> buffer & 1

    def _parts(self, first: int, last: int) -> Iterator[int]:
        """The largest nodes that make up the steps."""
        low, high = first + self.size, last + self.size + 1
        while low < high:
            if low & 1:
                yield low
                low += 1
            if high & 1:
                high -= 1
                yield high
            low, high = low >> 1, high >> 1

    def _around(self, first: int, last: int) -> Iterator[int]:
        """The nodes that contain the first or the last step."""
        low, high = first + self.size, last + self.size
        while low:
            yield low
            if high != low:
                yield high
            low, high = low >> 1, high >> 1
