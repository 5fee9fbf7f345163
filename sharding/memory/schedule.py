"""In which order a device runs its kernels.

XLA:CPU runs what is ready in the order in which it became so, which keeps many threads busy and many arrays alive
(openxla/xla, `service/hlo_memory_scheduler.cc`, `BFSMemoryScheduler`); it combines all-reduces over the same devices,
one after the other until one waits for those before it, and begins again with that one
(`service/cpu/cpu_all_reduce_combiner.cc`, `service/collective_combiner_utils.h`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .fusion import Kernel
from .instruction import Instruction


@dataclass(slots=True, eq=False)
class Step:
    """Kernels that run at once: one, or collectives that were combined."""

    kernels: list[Kernel]

    @property
    def operands(self) -> list[Instruction]:
        """What the kernels read."""
        return list(dict.fromkeys(x for k in self.kernels for x in k.operands))


Reads = Mapping[int, list[int]]
"""Kernel -> those that it reads, by number."""

Order = Callable[[Sequence[Kernel], Sequence[Instruction]], list[Step]]
"""Kernels in the order of the program, and results -> steps in the order in which they run."""


def as_written(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """One after the other as in the program, nothing combined."""
    del results
    return [Step([kernel]) for kernel in kernels]


def as_ready(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """Breadth first, all-reduces combined, as XLA:CPU has them."""
    return breadth_first(combined(kernels, results))


def combined(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """The kernels as steps; all-reduces of one group are one step as long as none waits for another of them.

    They are found in the order of a walk from the results, what the first one needs first; only all-reduces are walked
    to, so that the time grows with the square of their number, and with that of the other kernels hardly.
    """
    place = {kernel.root: k for k, kernel in enumerate(kernels)}
    reads = [[place[x] for x in kernel.operands if x is not kernel.root] for kernel in kernels]
    ends = list(dict.fromkeys([place[x] for x in results] + list(range(len(kernels)))))
    members = [[k] for k in range(len(kernels))]
    home = list(range(len(kernels)))
    nearest = _Nearest([kernel.root.group is not None for kernel in kernels], reads)
    sums = nearest.behind(ends)
    before = {k: nearest.behind(reads[k]) for k in sums}
    order = _walk(sums, before, home)
    waiting = set(order)
    start = 0
    while waiting:
        while order[start] not in waiting:
            start += 1
        joined = _joined(order[start:], before, home, waiting, kernels)
        waiting -= {*joined}
        first = joined[0]
        for k in joined[1:]:
            home[k] = first
            members[first] += members[k]
            reads[first] += reads[k]
            before[first] = list(dict.fromkeys(home[r] for r in before[first] + before[k]))
        if len(joined) > 1:
            order = _walk([home[k] for k in sums], before, home, order[:start])
    merged = sorted((min(members[k]), k) for k in range(len(kernels)) if home[k] == k)
    order = _walk([k for _, k in merged], dict(enumerate(reads)), home)
    return [Step([kernels[m] for m in members[k]]) for k in order]


class _Nearest:
    """Finds the all-reduces that kernels wait for with no other one between."""

    def __init__(self, is_sum: Sequence[bool], reads: Sequence[Sequence[int]]):
        self.is_sum, self.reads = is_sum, reads
        self.waits = list(is_sum)
        """Per kernel whether it is one, or waits for any."""
        for k, sources in enumerate(reads):
            self.waits[k] = is_sum[k] or any(self.waits[r] for r in sources)

    def behind(self, kernels: Sequence[int]) -> list[int]:
        """Those that some kernels are or wait for, in the order of a walk."""
        found: dict[int, None] = {}
        seen: set[int] = set()
        waiting = [*reversed(kernels)]
        while waiting:
            k = waiting.pop()
            if self.is_sum[k]:
                found[k] = None
            elif self.waits[k] and k not in seen:
                seen.add(k)
                waiting += reversed(self.reads[k])
        return list(found)


def _joined(
    order: Sequence[int], reads: Reads, home: list[int], waiting: set[int], kernels: Sequence[Kernel]
) -> list[int]:
    """The first of some kernels with those of its group up to one that waits for any of them."""
    first = order[0]
    joined, behind = [first], {first}
    for k in order[1:]:
        is_alike = k in waiting and kernels[k].root.group == kernels[first].root.group
        if any(home[r] in behind for r in reads[k]):
            if is_alike:
                break
            behind.add(k)
        elif is_alike:
            joined.append(k)
            behind.add(k)
    return joined


def _walk(ends: Sequence[int], reads: Reads, home: list[int], done: Sequence[int] = ()) -> list[int]:
    """All that some kernels need and they themselves, each behind what it reads; first what was walked to before."""
    order = dict.fromkeys(done)
    for end in ends:
        path = [] if end in order else [(end, iter(reads[end]))]
        while path:
            k, rest = path[-1]
            missing = next((h for r in rest if (h := home[r]) not in order and h != k), None)
            if missing is None:
                order[k] = None
                path.pop()
            else:
                path.append((missing, iter(reads[missing])))
    return list(order)


def breadth_first(steps: Sequence[Step]) -> list[Step]:
    """The order in which steps become ready."""
    home = {k.root: step for step in steps for k in step.kernels}
    readers: dict[Step, list[Step]] = {step: [] for step in steps}
    missing: dict[Step, int] = {}
    for step in steps:
        sources = dict.fromkeys(home[x] for x in step.operands if home[x] is not step)
        missing[step] = len(sources)
        for source in sources:
            readers[source].append(step)
    ready = deque(step for step in steps if not missing[step])
    order = []
    while ready:
        step = ready.popleft()
        order.append(step)
        for reader in readers[step]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    assert len(order) == len(steps)
    return order
