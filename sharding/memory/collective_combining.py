"""Combining of collectives over the same devices: all-reduces, and all-gathers on GPUs.

XLA combines collectives one after the other until one depends on those before it, or until they are too large, and
begins again with that one (openxla/xla, `service/collective_combiner_utils.h`, `cpu/cpu_all_reduce_combiner.cc`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .fusion import Kernel
from .instruction import Instruction

Operands = Mapping[int, list[int]]
"""Kernel -> those that it reads, by number."""


def combine_collectives(
    kernels: Sequence[Kernel], results: Sequence[Instruction], most_bytes: float = math.inf
) -> list[list[Kernel]]:
    """The kernels in a topological order, combined collectives as one entry of at most `most_bytes`.

    Collectives of one group are combined as long as none depends on another of them. They are visited in post-order
    from the results, the first one's operands first. Only collectives are visited again after each combination, so the
    time is quadratic in their number and nearly independent of the other kernels'.
    """
    index = {kernel.root: k for k, kernel in enumerate(kernels)}
    operands = [[index[x] for x in kernel.operands if x is not kernel.root] for kernel in kernels]
    ends = list(dict.fromkeys([index[x] for x in results] + list(range(len(kernels)))))
    members = [[k] for k in range(len(kernels))]
    leader = list(range(len(kernels)))
    nearest = _NearestCollectives([kernel.root.group is not None for kernel in kernels], operands)
    collectives = nearest.of(ends)
    before = {k: nearest.of(operands[k]) for k in collectives}
    order = _postorder(collectives, before, leader)
    waiting = {k for k in order if kernels[k].root.num_bytes <= most_bytes}
    start = 0
    while waiting:
        while order[start] not in waiting:
            start += 1
        combined = _combinable(order[start:], before, leader, waiting, kernels, most_bytes)
        waiting -= {*combined}
        first = combined[0]
        for k in combined[1:]:
            leader[k] = first
            members[first] += members[k]
            operands[first] += operands[k]
            before[first] = list(dict.fromkeys(leader[r] for r in before[first] + before[k]))
        if len(combined) > 1:
            order = _postorder([leader[k] for k in collectives], before, leader, order[:start])
    merged = sorted((min(members[k]), k) for k in range(len(kernels)) if leader[k] == k)
    order = _postorder([k for _, k in merged], dict(enumerate(operands)), leader)
    return [[kernels[m] for m in members[k]] for k in order]


class _NearestCollectives:
    """Finds the combinable collectives that kernels depend on with no other between."""

    def __init__(self, is_combinable: Sequence[bool], operands: Sequence[Sequence[int]]):
        self.is_combinable, self.operands = is_combinable, operands
        self.depends = list(is_combinable)
        """Per kernel whether it is combinable or depends on one that is."""
        for k, sources in enumerate(operands):
            self.depends[k] = is_combinable[k] or any(self.depends[r] for r in sources)

    def of(self, kernels: Sequence[int]) -> list[int]:
        """The combinable ones among some kernels or nearest above them, in depth-first order."""
        found: dict[int, None] = {}
        seen: set[int] = set()
        waiting = [*reversed(kernels)]
        while waiting:
            k = waiting.pop()
            if self.is_combinable[k]:
                found[k] = None
            elif self.depends[k] and k not in seen:
                seen.add(k)
                waiting += reversed(self.operands[k])
        return list(found)


def _combinable(
    order: Sequence[int],
    operands: Operands,
    leader: list[int],
    waiting: set[int],
    kernels: Sequence[Kernel],
    most_bytes: float,
) -> list[int]:
    """The first kernel and those of its group up to one that depends on any of them, or makes them too large."""
    first = order[0]
    num_bytes = kernels[first].root.num_bytes
    combined, dependent = [first], {first}
    for k in order[1:]:
        is_same_group = k in waiting and kernels[k].root.group == kernels[first].root.group
        if any(leader[r] in dependent for r in operands[k]):
            if is_same_group:
                break
            dependent.add(k)
        elif is_same_group:
            num_bytes += kernels[k].root.num_bytes
            if num_bytes > most_bytes:
                break
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
