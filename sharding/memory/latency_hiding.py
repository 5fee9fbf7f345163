"""Order of kernels on GPUs: XLA's latency-hiding scheduler.

It works from the last kernel to the first (openxla/xla, `service/latency_hiding_scheduler.cc`, with the policies of
`service/gpu/gpu_hlo_schedule.cc`). The end of a collective is placed as soon as no other is in flight; its start once
the kernels placed in between take as long as its latency. Among the ready kernels it prefers those that need no wait,
then those behind the longest chain of collectives, whose latencies are still to be hidden. So kernels that nothing
waits for, as the weights' gradients, move away from where the program has them, and their operands live longer: models
with unrolled layers peak at up to twice the memory that the program's order takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from . import gpu_latencies
from .collective_combining import combine_collectives
from .fusion import Kernel
from .instruction import Body, Instruction, all_instructions
from .kernel_order import Step
from .sibling_fusion import fuse_siblings

COMBINED_BYTES = 30 * 2**20
"""All-reduces are combined up to this size (`xla_gpu_all_reduce_combine_threshold_bytes`)."""
FILL_BYTES = 2**20
"""Constants of this size are written right before they are read."""


@dataclass(slots=True, eq=False)
class _Node:
    """Kernels that run at once, or the start or end of a collective."""

    kernels: list[Kernel]
    part: Literal["kernel", "start", "end"]
    position: int
    """In program order."""
    microseconds: float
    latency: float = 0.0
    """From the start of a collective to its end."""
    twin: _Node | None = None
    """The end of a start, and the reverse."""
    sources: list[_Node] = field(default_factory=list)
    readers: list[tuple[_Node, float]] = field(default_factory=list)
    """Each with the time from the end of this node to it."""
    num_readers_left: int = 0
    depth: float = 0.0
    """The latencies of the collectives that it depends on."""
    ends_before: bool = False
    """Whether it reads the result of a collective."""
    ready: float = 0.0
    """The earliest time for it, from the end of the program; once placed, its time."""

    @property
    def is_free(self) -> bool:
        return self.part == "kernel" and not self.microseconds

    @property
    def communicates(self) -> bool:
        """Whether it is a loop or branch with collectives, which run while no other is in flight."""
        return any(_communicates(body) for body in self.kernels[0].root.bodies)

    @property
    def is_fill(self) -> bool:
        root = self.kernels[0].root
        return self.part == "kernel" and not self.kernels[0].operands and root.num_bytes >= FILL_BYTES

    @property
    def num_unlocked(self) -> int:
        """How many nodes become ready when it is placed."""
        return sum(s.num_readers_left == 1 for s in self.sources)


def xla_gpu_order(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """Small all-reduces combined, siblings fused, and collectives overlapped with other kernels, as on XLA:GPU."""
    units = fuse_siblings(combine_collectives(kernels, results, COMBINED_BYTES))
    return _steps(_Scheduler(_nodes(units)).order())


def _communicates(body: Body) -> bool:
    return any(one.name in gpu_latencies.COLLECTIVES for one in all_instructions(body))


def _nodes(units: Iterable[list[Kernel]]) -> list[_Node]:
    """A node per unit, two per collective, with their dependencies."""
    nodes: list[_Node] = []
    made: dict[Instruction, _Node] = {}
    for k, unit in enumerate(units):
        root = unit[0].root
        if root.role == "unfusible" and root.name in gpu_latencies.COLLECTIVES:
            latency = gpu_latencies.collective_us(unit)
            first, last = (_Node(unit, part, k, gpu_latencies.START_US, latency) for part in ("start", "end"))
            first.twin, last.twin = last, first
            _connect(first, last, latency)
            nodes += [first, last]
        else:
            first = last = _Node(unit, "kernel", k, sum(map(gpu_latencies.kernel_us, unit)))
            nodes.append(first)
        made.update((kernel.root, last) for kernel in unit)
        sources = dict.fromkeys(made[x] for kernel in unit for x in kernel.operands if x in made)
        for source in sources:
            if source is not first and source is not last:
                _connect(source, first, gpu_latencies.START_US)
    for node in nodes:
        node.num_readers_left = len(node.readers)
        node.ends_before = any(s.part == "end" for s in node.sources)
        own = node.latency if node.part == "end" else 0.0
        node.depth = max((s.depth for s in node.sources), default=0.0) + own
    return nodes


def _connect(source: _Node, reader: _Node, latency: float) -> None:
    source.readers.append((reader, latency))
    reader.sources.append(source)


class _Scheduler:
    def __init__(self, nodes: list[_Node]):
        self.nodes = nodes
        self.now = 0.0
        self.in_flight: _Node | None = None
        self.free: list[_Node] = []
        self.ends: list[_Node] = []
        self.fills: list[_Node] = []
        self.start: _Node | None = None
        """The start of the collective in flight, once all that follows it is placed."""
        self.loops: list[_Node] = []
        """Kernels that communicate."""
        self.waiting: list[tuple[float, int, _Node]] = []
        """Kernels that are ready later, a heap by time."""
        self.by_depth: dict[float, list[_Node]] = {}
        """Kernels that are ready."""
        self.depths: list[float] = []
        """The depths of `by_depth`, negated, as a heap."""

    def order(self) -> list[_Node]:
        """The nodes in the order in which they run."""
        for node in self.nodes:
            if not node.num_readers_left:
                self.release(node)
        order: list[_Node] = []
        while len(order) < len(self.nodes):
            node = self.next()
            node.ready = max(self.now, self.earliest(node))
            self.now = node.ready + node.microseconds
            if node.part != "kernel":
                self.in_flight = node.twin if node.part == "end" else None
            order.append(node)
            for source in node.sources:
                source.num_readers_left -= 1
                if not source.num_readers_left:
                    self.release(source)
        return order[::-1]

    def earliest(self, node: _Node) -> float:
        return max((reader.ready + latency for reader, latency in node.readers), default=0.0)

    def release(self, node: _Node) -> None:
        """Make a node available whose readers are all placed."""
        node.ready = max(self.now, self.earliest(node))
        if node.is_free:
            self.free.append(node)
        elif node.part == "end":
            self.ends.append(node)
        elif node.part == "start":
            self.start = node
        elif node.is_fill:
            self.fills.append(node)
        elif node.communicates:
            self.loops.append(node)
        else:
            heapq.heappush(self.waiting, (node.ready, -node.position, node))

    def next(self) -> _Node:
        """The best available node."""
        for simple in (self.free, self.fills):
            if simple:
                return simple.pop()
        if self.ends and self.in_flight is None:
            best = max(self.ends, key=lambda n: (-max(n.ready - self.now, 0.0), n.depth, *_preference(n)))
            self.ends.remove(best)
            return best
        while self.waiting and self.waiting[0][0] <= self.now:
            self.add(heapq.heappop(self.waiting)[2])
        start = self.start
        depth = self.deepest()
        if self.loops and self.in_flight is None:
            loop = max(self.loops, key=lambda n: n.depth)
            if depth is None or loop.depth > depth:
                self.loops.remove(loop)
                return loop
        if start is not None and start.ready <= self.now and self.is_start_next(start, depth):
            self.start = None
            return start
        if depth is not None:
            return self.take(depth)
        if start is not None and (not self.waiting or start.ready <= self.waiting[0][0]):
            self.start = None
            return start
        return heapq.heappop(self.waiting)[2]

    def add(self, node: _Node) -> None:
        if node.depth not in self.by_depth:
            self.by_depth[node.depth] = []
            heapq.heappush(self.depths, -node.depth)
        self.by_depth[node.depth].append(node)

    def deepest(self) -> float | None:
        """The largest depth of a ready kernel."""
        while self.depths and not self.by_depth[-self.depths[0]]:
            del self.by_depth[-heapq.heappop(self.depths)]
        return -self.depths[0] if self.depths else None

    def is_start_next(self, start: _Node, depth: float | None) -> bool:
        """Whether a start whose latency is hidden goes before the ready kernels."""
        if depth is None or self.ends:  # another collective waits for this one
            return True
        return start.depth > 0 and start.depth > depth

    def take(self, depth: float) -> _Node:
        """The best ready kernel of a depth: the one that fits best into the latency left, then see `_preference`."""
        nodes = self.by_depth[depth]
        found = nodes
        later = [n.ready for n in (self.start,) if n is not None and n.ready > self.now]
        later += [self.waiting[0][0]] if self.waiting else []
        if later:
            left = min(later) - self.now
            closest = min(abs(left - n.microseconds) for n in nodes)
            found = [n for n in nodes if abs(left - n.microseconds) == closest]
        best = max(found, key=_preference)
        nodes.remove(best)
        return best


def _preference(node: _Node) -> tuple[bool, int, int]:
    return node.ends_before, node.num_unlocked, node.position


def _steps(order: Sequence[_Node]) -> list[Step]:
    """The steps of scheduled nodes.

    The operands of a collective live until it ends; an all-reduce that overlaps other kernels works in place instead.
    """
    busy = [n for n in order if n.part != "kernel" or n.microseconds]
    overlapped = {a for a, b in zip(busy, busy[1:], strict=False) if a.part == "start" and b is not a.twin}
    steps: list[Step] = []
    awaited: list[Instruction] = []
    for node in order:
        is_in_place = node.kernels[0].root.name == "all-reduce" and (node in overlapped or node.twin in overlapped)
        if node.part != "end":
            steps.append(Step(node.kernels, awaited=awaited, is_in_place=is_in_place))
            awaited = []
        elif not is_in_place:
            awaited = awaited + [x for kernel in node.kernels for x in kernel.operands]
    if awaited:
        steps[-1].awaited = steps[-1].awaited + awaited
    return steps
