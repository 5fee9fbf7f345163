"""Combining of collectives over the same devices.

Operands first, a collective joins the open batch of its group, unless it depends on that batch or is too large for it:
then it opens the next (openxla/xla, `service/collective_combiner_utils.h`, `cpu/cpu_all_reduce_combiner.cc`). On TPUs
it joins the first batch that has space, so that small ones fill up earlier batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence


def combined_collectives(
    operands: Sequence[Sequence[int]],
    groups: Mapping[int, object],
    ends: Sequence[int],
    sizes: Mapping[int, int],
    most_bytes: float = math.inf,
    *,
    refills: bool = False,
) -> list[list[int]]:
    """The ops of a program in a topological order, combined collectives as one entry.

    Args:
        operands: per op those whose results it reads.
        groups: collective -> what it shares with those that it may be combined with.
        ends: the ops from which the program is walked, operands first: those that make its results.
        sizes: collective -> its bytes.
        most_bytes: of a batch.
        refills: whether a collective joins the first batch that has space, not only the last one.
    """
    groups = {k: group for k, group in groups.items() if sizes[k] <= most_bytes}
    batches = _Batches(most_bytes, refills)
    needed = [0] * len(operands)
    batch_of: dict[int, int] = {}
    for k in postorder([*ends, *range(len(operands))], operands):
        for j in operands[k]:
            needed[k] |= needed[j]
        if k in groups:
            batch_of[k] = batches.join(groups[k], needed[k], sizes[k])
            needed[k] = 1 << batch_of[k]
    first: dict[int, int] = {}
    leader = [first.setdefault(batch_of[k], k) if k in batch_of else k for k in range(len(operands))]
    members: dict[int, list[int]] = {}
    for k in range(len(operands)):
        members.setdefault(leader[k], []).append(k)
    sources = {k: [leader[j] for m in unit for j in operands[m] if leader[j] != k] for k, unit in members.items()}
    return [members[k] for k in postorder(members, sources)]


class _Batches:
    """Combined collectives by number. Sets of batches are integers with a bit for each."""

    def __init__(self, most_bytes: float, refills: bool):
        self.most_bytes, self.refills = most_bytes, refills
        self.num_bytes: list[int] = []
        """Per batch."""
        self.open: dict[object, list[int]] = {}
        self.before: list[int] = []
        """Per batch those that it depends on, and itself."""
        self.read = 0
        """The batches that others depend on."""

    def join(self, group: object, needed: int, num_bytes: int) -> int:
        """The batch of a collective that depends on the batches `needed`."""
        rest = needed
        while rest:
            before = self.before[rest.bit_length() - 1]
            needed, rest = needed | before, rest & ~before
        batches = self.open.setdefault(group, [])
        found = next((b for b in batches if not needed >> b & 1 and not self.is_full(b, num_bytes)), None)
        if found is None:
            found = len(self.before)
            batches[:] = [*(batches if self.refills else ()), found]
            self.before.append(1 << found)
            self.num_bytes.append(0)
        self.num_bytes[found] += num_bytes
        if self.read >> found & 1 and needed & ~self.before[found]:
            self.before = [others | needed if others >> found & 1 else others for others in self.before]
        self.before[found] |= needed
        self.read |= needed
        return found

    def is_full(self, batch: int, num_bytes: int) -> bool:
        """Whether a batch has no space for a collective."""
        return self.num_bytes[batch] + num_bytes > self.most_bytes


def postorder(ends: Iterable[int], operands: Mapping[int, Sequence[int]] | Sequence[Sequence[int]]) -> list[int]:
    """Some nodes and all they depend on, operands first."""
    order: dict[int, None] = {}
    for end in ends:
        path = [] if end in order else [(end, iter(operands[end]))]
        while path:
            k, rest = path[-1]
            missing = next((j for j in rest if j not in order), None)
            if missing is None:
                order[k] = None
                path.pop()
            else:
                path.append((missing, iter(operands[missing])))
    return list(order)


def first_ready(keys: Sequence[int], operands: Sequence[Iterable[int]]) -> list[int]:
    """Nodes by their keys, each as soon as what it depends on is there."""
    waiting, readers = [0] * len(keys), [list[int]() for _ in keys]
    for k, sources in enumerate(operands):
        for j in sources:
            waiting[k] += 1
            readers[j].append(k)
    ready = [(keys[k], k) for k, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, k = heapq.heappop(ready)
        order.append(k)
        for reader in readers[k]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (keys[reader], reader))
    return order
