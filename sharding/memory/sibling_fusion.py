"""Multi-output fusion: kernels that read the same array run as one (openxla/xla, `multi_output_fusion.cc`)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .fusion import Kernel
from .instruction import Instruction

MIN_BYTES = 2**16
"""Kernels that share smaller arrays are fused, too, but don't matter."""


def fuse_siblings(units: Sequence[Sequence[Kernel]]) -> list[list[Kernel]]:
    """The units in an order that keeps the program's where it can, siblings merged.

    Siblings loop over the elements of an array that both read, and don't depend on each other.

    Args:
        units: of kernels that run at once, in program order.
    """
    return _Siblings(units).merged()


class _Siblings:
    def __init__(self, units: Sequence[Sequence[Kernel]]):
        self.units = [list(unit) for unit in units]
        self.owner = {kernel.root: k for k, unit in enumerate(units) for kernel in unit}
        self.sources = [self.sources_of(k) for k in range(len(units))]
        self.before: list[int] = []
        """Per unit those that it depends on and itself, as bits."""
        for k, sources in enumerate(self.sources):
            bits = 1 << k
            for j in sources:
                bits |= self.before[j]
            self.before.append(bits)

    def sources_of(self, k: int) -> list[int]:
        found = dict.fromkeys(self.owner[x] for kernel in self.units[k] for x in kernel.operands if x in self.owner)
        return [j for j in found if j != k]

    def merged(self) -> list[list[Kernel]]:
        readers: dict[Instruction, list[int]] = {}
        for k, unit in enumerate(self.units):
            if len(unit) == 1 and unit[0].root.role == "fusible":
                sizes = unit[0].root.num_elements, max(m.num_elements for m in unit[0].members)
                for x in unit[0].operands:
                    if x.num_bytes >= MIN_BYTES and x.num_elements in sizes:
                        readers.setdefault(x, []).append(k)
        leader = list(range(len(self.units)))
        for siblings in readers.values():
            leaders: list[int] = []
            for k in siblings:
                first = _find(leader, k)
                if first in leaders:
                    continue
                other = next((j for j in leaders if not self.depends(first, j)), None)
                if other is None:
                    leaders.append(first)
                else:
                    leader[first] = other
                    self.merge(first, other)
        return self.sorted()

    def depends(self, a: int, b: int) -> bool:
        """Whether one of two units depends on the other."""
        return bool(self.before[a] >> b & 1 or self.before[b] >> a & 1)

    def merge(self, k: int, into: int) -> None:
        self.units[into] += self.units[k]
        self.units[k] = []
        both, bits = self.before[k] | self.before[into], 1 << k | 1 << into
        self.before = [has | both if has & bits else has for has in self.before]

    def sorted(self) -> list[list[Kernel]]:
        self.owner = {kernel.root: k for k, unit in enumerate(self.units) for kernel in unit}
        readers: list[list[int]] = [[] for _ in self.units]
        missing = []
        for k in range(len(self.units)):
            sources = self.sources_of(k)
            missing.append(len(sources))
            for j in sources:
                readers[j].append(k)
        ready = [k for k, count in enumerate(missing) if not count and self.units[k]]
        heapq.heapify(ready)
        order = []
        while ready:
            k = heapq.heappop(ready)
            order.append(self.units[k])
            for j in readers[k]:
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready, j)
        assert len(order) == sum(map(bool, self.units))
        return order


def _find(leader: list[int], k: int) -> int:
    while leader[k] != k:
        k = leader[k]
    return k
