"""A greedy schedule: of the kernels that are ready, the one that frees most memory runs next.

As XLA's list scheduler (openxla/xla, `hlo/transforms/simplifiers/hlo_memory_scheduler.cc`, `ListScheduler`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from .fusion import Kernel
from .instruction import Instruction


def list_order(
    units: Sequence[Sequence[Kernel]], sources: Sequence[Sequence[int]], results: Sequence[Instruction]
) -> list[int]:
    """The units in the order in which they run.

    Arrays of one element run as soon as they are ready, and of equal units the one with most readers.

    Args:
        units: kernels that run at once, in a topological order.
        sources: per unit those whose results it reads.
        results: kept to the end.
    """
    return _ListSchedule(units, sources, results).order()


class _ListSchedule:
    def __init__(
        self, units: Sequence[Sequence[Kernel]], sources: Sequence[Sequence[int]], results: Sequence[Instruction]
    ):
        self.units, self.sources = units, sources
        self.readers: list[list[int]] = [[] for _ in units]
        for k, own in enumerate(sources):
            for j in own:
                self.readers[j].append(k)
        arrays = _arrays(units)
        self.read = [list(dict.fromkeys(arrays[x] for kernel in unit for x in kernel.operands)) for unit in units]
        """Per unit the arrays that it reads."""
        self.waiting: dict[Instruction, set[int]] = {}
        """Array -> the units that still have to read it."""
        for k, own in enumerate(self.read):
            for x in own:
                self.waiting.setdefault(x, set()).add(k)
        self.kept = {arrays.get(x, x) for x in results}
        self.defined = [
            sum(
                kernel.root.num_bytes
                for kernel in unit
                if arrays[kernel.root] is kernel.root and kernel.root.role != "argument"
            )
            for unit in units
        ]
        self.queue: list[tuple[float, int, int, int]] = []
        self.entry: dict[int, int] = {}
        """Unit -> the number of its entry in the queue that counts."""
        self.num_entries = 0

    def order(self) -> list[int]:
        left = [len(own) for own in self.sources]
        for k, count in enumerate(left):
            if not count:
                self.push(k)
        found = []
        while self.queue:
            _, _, number, k = heapq.heappop(self.queue)
            if self.entry[k] != -number:
                continue
            found.append(k)
            self.entry[k] = 0
            for x in self.read[k]:
                self.waiting[x].discard(k)
                if len(self.waiting[x]) == 1 and x not in self.kept:
                    (last,) = self.waiting[x]
                    if not left[last]:
                        self.push(last)
            for reader in self.readers[k]:
                left[reader] -= 1
                if not left[reader]:
                    self.push(reader)
        return found

    def push(self, k: int) -> None:
        """Queues a unit that is ready, or again with another priority; the last entry of equal ones comes first."""
        self.num_entries += 1
        self.entry[k] = self.num_entries
        heapq.heappush(self.queue, (-self.freed(k), -len(self.readers[k]), -self.num_entries, k))

    def freed(self, k: int) -> float:
        """The bytes that are free after a unit less those that it makes."""
        if all(kernel.root.num_elements == 1 for kernel in self.units[k]):
            return math.inf
        last = (x for x in self.read[k] if len(self.waiting[x]) == 1 and x not in self.kept and x.role != "argument")
        return sum(x.num_bytes for x in last) - self.defined[k]


def _arrays(units: Sequence[Sequence[Kernel]]) -> Mapping[Instruction, Instruction]:
    """Each stored array -> the one that it is a view of, or itself."""
    found: dict[Instruction, Instruction] = {}
    for unit in units:
        for kernel in unit:
            found[kernel.root] = found[kernel.operands[0]] if kernel.is_view and kernel.operands else kernel.root
    return found
