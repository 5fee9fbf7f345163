"""Combining of all-reduces over the same devices, as XLA:CPU does it.

XLA combines all-reduces one after the other until one depends on those before it, and begins again with that one
(openxla/xla, `service/cpu/cpu_all_reduce_combiner.cc`, `service/collective_combiner_utils.h`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .fusion import Kernel
from .instruction import Instruction

Operands = Mapping[int, list[int]]
"""Kernel -> those that it reads, by number."""


def combine_all_reduces(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[list[Kernel]]:
    """The kernels in a topological order, combined all-reduces as one entry.

    All-reduces of one group are combined as long as none depends on another of them. They are visited in post-order
    from the results, the first one's operands first. Only all-reduces are visited again after each combination, so the
    time is quadratic in their number and nearly independent of the other kernels'.
    """
    index = {kernel.root: k for k, kernel in enumerate(kernels)}
    operands = [[index[x] for x in kernel.operands if x is not kernel.root] for kernel in kernels]
    ends = list(dict.fromkeys([index[x] for x in results] + list(range(len(kernels)))))
    members = [[k] for k in range(len(kernels))]
    leader = list(range(len(kernels)))
    nearest = _NearestAllReduces([kernel.root.group is not None for kernel in kernels], operands)
    all_reduces = nearest.of(ends)
    before = {k: nearest.of(operands[k]) for k in all_reduces}
    order = _postorder(all_reduces, before, leader)
    waiting = set(order)
    start = 0
    while waiting:
        while order[start] not in waiting:
            start += 1
        combined = _combinable(order[start:], before, leader, waiting, kernels)
        waiting -= {*combined}
        first = combined[0]
        for k in combined[1:]:
            leader[k] = first
            members[first] += members[k]
            operands[first] += operands[k]
            before[first] = list(dict.fromkeys(leader[r] for r in before[first] + before[k]))
        if len(combined) > 1:
            order = _postorder([leader[k] for k in all_reduces], before, leader, order[:start])
    merged = sorted((min(members[k]), k) for k in range(len(kernels)) if leader[k] == k)
    order = _postorder([k for _, k in merged], dict(enumerate(operands)), leader)
    return [[kernels[m] for m in members[k]] for k in order]


class _NearestAllReduces:
    """Finds the all-reduces that kernels depend on with no other all-reduce between."""

    def __init__(self, is_all_reduce: Sequence[bool], operands: Sequence[Sequence[int]]):
        self.is_all_reduce, self.operands = is_all_reduce, operands
        self.depends = list(is_all_reduce)
        """Per kernel whether it is an all-reduce or depends on one."""
        for k, sources in enumerate(operands):
            self.depends[k] = is_all_reduce[k] or any(self.depends[r] for r in sources)

    def of(self, kernels: Sequence[int]) -> list[int]:
        """The all-reduces among some kernels or nearest above them, in depth-first order."""
        found: dict[int, None] = {}
        seen: set[int] = set()
        waiting = [*reversed(kernels)]
        while waiting:
            k = waiting.pop()
            if self.is_all_reduce[k]:
                found[k] = None
            elif self.depends[k] and k not in seen:
                seen.add(k)
                waiting += reversed(self.operands[k])
        return list(found)


def _combinable(
    order: Sequence[int], operands: Operands, leader: list[int], waiting: set[int], kernels: Sequence[Kernel]
) -> list[int]:
    """The first kernel and those of its group up to one that depends on any of them."""
    first = order[0]
    combined, dependent = [first], {first}
    for k in order[1:]:
        is_same_group = k in waiting and kernels[k].root.group == kernels[first].root.group
        if any(leader[r] in dependent for r in operands[k]):
            if is_same_group:
                break
            dependent.add(k)
        elif is_same_group:
            combined.append(k)
            dependent.add(k)
    return combined


def _postorder(ends: Sequence[int], operands: Operands, leader: list[int], done: Sequence[int] = ()) -> list[int]:
    """Some kernels and all they depend on, operands first, behind those already visited."""
    order = dict.fromkeys(done)
    for end in ends:
        path = [] if end in order else [(end, iter(operands[end]))]
        while path:
            k, rest = path[-1]
            missing = next((h for r in rest if (h := leader[r]) not in order and h != k), None)
            if missing is None:
                order[k] = None
                path.pop()
            else:
                path.append((missing, iter(operands[missing])))
    return list(order)
