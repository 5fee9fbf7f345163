"""Order of a program's work on GPUs: XLA's latency-hiding scheduler.

It works from the end of the program to its start (openxla/xla, `service/latency_hiding_scheduler.cc`, with the
policies of `service/gpu/gpu_hlo_schedule.cc`). The end of a collective, or a loop that has some, is placed as soon as
no other is in flight; a start once the work placed in between takes as long as its latency. Among what is ready it
prefers what is behind the longest chain of collectives, whose latencies are still to be hidden, then what best fills
the time until something else is ready. What is read through a view is not ready at once. So work that nothing waits
for, as the weights' gradients, moves away from where the program has it. Large constants are filled right before they
are read.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .gpu_latencies import START_US

Part = Literal["kernel", "start", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A kernel, or a collective."""

    microseconds: float
    """Of the kernel, or from the start of the collective to its end."""
    after: tuple[int, ...] = ()
    """Indices of the work it depends on."""
    views: frozenset[int] = frozenset()
    """Those that it reads as one of several results, or reshaped."""
    is_collective: bool = False
    communicates: bool = False
    """Whether it is a loop or branch with collectives, which runs while no other collective is in flight."""
    is_view: bool = False
    """Whether it only names an array, so that it is placed as soon as it is ready."""
    is_filled_late: bool = False
    """Whether it is a large constant, placed as soon as it is ready."""


@dataclass(slots=True, eq=False)
class _Node:
    """A kernel, or the start or end of a collective."""

    part: Part
    work: Work
    position: int
    """In program order."""
    twin: _Node | None = None
    """The end of a start, and the reverse."""
    sources: list[_Node] = field(default_factory=list)
    readers: list[tuple[_Node, float]] = field(default_factory=list)
    """Each with the time from it to this node."""
    num_readers_left: int = 0
    num_last_reads: int = 0
    """The number of its sources that wait for it alone."""
    depth: float = 0.0
    """The latencies of the collectives that it depends on."""
    ends_before: bool = False
    """Whether it reads the result of a collective."""
    is_placed: bool = False
    queue: _Ready | None = None
    """Where it waits, once it is ready."""
    ready: float = 0.0
    """The earliest time for it, from the end of the program; once placed, its time."""
    done: float = 0.0
    """When the device goes on, once it is placed."""

    @property
    def microseconds(self) -> float:
        """For which it keeps the device busy."""
        return self.work.microseconds if self.part == "kernel" else START_US

    @property
    def preference(self) -> tuple[bool, int, int]:
        """Preferred are the nodes behind a collective, then those that make most others ready, then the last."""
        return self.ends_before, self.num_last_reads, self.position


def latency_hiding_order(works: Sequence[Work]) -> list[tuple[int, Part]]:
    """The indices of a program's work in the order in which it runs; a collective has a start and an end.

    Args:
        works: in program order, each after those that it depends on.
    """
    return [(node.position, node.part) for node in _Scheduler(_nodes(works)).order()]


def _nodes(works: Sequence[Work]) -> list[_Node]:
    """A node per kernel, two per collective, with their dependencies."""
    nodes: list[_Node] = []
    last: list[_Node] = []
    for k, work in enumerate(works):
        if work.is_collective:
            first, end = _Node("start", work, k), _Node("end", work, k)
            first.twin, end.twin = end, first
            _connect(first, end, work.microseconds)
            nodes += [first, end]
        else:
            first = end = _Node("kernel", work, k)
            nodes.append(first)
        last.append(end)
        for j in work.after:
            _connect(last[j], first, START_US)
    for node in nodes:
        node.num_readers_left = len(node.readers)
        if len(node.readers) == 1:
            node.readers[0][0].num_last_reads += 1
        node.ends_before = any(s.part == "end" for s in node.sources)
        own = node.work.microseconds if node.part == "end" else 0.0
        node.depth = max((s.depth for s in node.sources), default=0.0) + own
    return nodes


def _connect(source: _Node, reader: _Node, latency: float) -> None:
    source.readers.append((reader, latency))
    reader.sources.append(source)


class _Ready:
    """The ready nodes of one depth, by preference: all, and by the time they take."""

    def __init__(self):
        self.nodes: list[_Entry] = []
        self.by_time: dict[float, list[_Entry]] = {}
        self.times: list[float] = []
        """The times of the nodes, sorted."""
        self.numbers: Counter[float] = Counter()
        """Of the nodes that take a time."""

    def push(self, node: _Node) -> None:
        """Add a node, or tell that it is preferred more than before."""
        time = node.microseconds
        if node.queue is None:
            node.queue = self
            self.numbers[time] += 1
        if time not in self.by_time:
            self.by_time[time] = []
            bisect.insort(self.times, time)
        entry = tuple(-part for part in node.preference), node
        heapq.heappush(self.nodes, entry)
        heapq.heappush(self.by_time[time], entry)

    def take(self, microseconds: float | None) -> _Node:
        """The best node: of those that take a time most nearly, if given, by preference."""
        heaps = [self.nodes] if microseconds is None else [self.by_time[time] for time in self.closest(microseconds)]
        for heap in heaps:
            while heap[0][1].queue is None:  # taken from another heap
                heapq.heappop(heap)
        best = min(heap[0] for heap in heaps)[1]
        best.queue, time = None, best.microseconds
        self.numbers[time] -= 1
        if not self.numbers[time]:
            del self.numbers[time], self.by_time[time], self.times[bisect.bisect_left(self.times, time)]
        return best

    def closest(self, microseconds: float) -> list[float]:
        """The times closest to another: one, or the two on both sides of it."""
        at = bisect.bisect_left(self.times, microseconds)
        around = self.times[max(0, at - 1) : at + 1]
        nearest = min(abs(microseconds - time) for time in around)
        return [time for time in around if abs(microseconds - time) == nearest]


_Entry = tuple[tuple[int, ...], _Node]
"""A node in a heap: its preference when it was pushed, negated, and the node. A later entry has a higher preference."""


class _Queue:
    """Nodes whose readers are all placed: those that are ready later, and those that are ready, by depth."""

    def __init__(self):
        self.later: list[tuple[float, int, _Node]] = []
        """A heap by time."""
        self.by_depth: dict[float, _Ready] = {}
        self.depths: list[float] = []
        """The depths of `by_depth`, negated, as a heap."""

    def push(self, node: _Node) -> None:
        heapq.heappush(self.later, (node.ready, -node.position, node))

    def advance(self, now: float) -> None:
        """Move what is ready by now."""
        while self.later and self.later[0][0] <= now:
            self.add_ready(heapq.heappop(self.later)[2])

    def deepest(self) -> float | None:
        """The largest depth of a ready node."""
        while self.depths and not self.by_depth[-self.depths[0]].times:
            del self.by_depth[-heapq.heappop(self.depths)]
        return -self.depths[0] if self.depths else None

    def add_ready(self, node: _Node) -> None:
        """Make a node ready, perhaps again after it was taken."""
        if node.depth not in self.by_depth:
            self.by_depth[node.depth] = _Ready()
            heapq.heappush(self.depths, -node.depth)
        self.by_depth[node.depth].push(node)

    def soonest(self, now: float) -> float | None:
        """When the next node is ready: now, if one is."""
        self.advance(now)
        if self.deepest() is not None:
            return now
        return self.later[0][0] if self.later else None

    def take(self, now: float, microseconds: float | None) -> _Node:
        """The best node of those ready by now: of the deepest that take a time most nearly, if given, by preference."""
        self.advance(now)
        depth = self.deepest()
        assert depth is not None
        return self.by_depth[depth].take(microseconds)


class _Scheduler:
    def __init__(self, nodes: list[_Node]):
        self.nodes = nodes
        self.now = 0.0
        self.in_flight: _Node | None = None
        self.views: list[_Node] = []
        self.constants, self.ends, self.kernels = _Queue(), _Queue(), _Queue()
        """Large constants; ends of collectives, and loops with collectives; other kernels."""
        self.start: _Node | None = None
        """The start of the collective in flight, once all that follows it is placed."""
        self.waits: list[float] = []
        """When what was not ready at once is ready, as a heap."""

    def order(self) -> list[_Node]:
        """The nodes in the order in which they run."""
        for node in self.nodes:
            if not node.num_readers_left:
                self.release(node)
        order: list[_Node] = []
        while len(order) < len(self.nodes):
            node = self.next()
            node.ready = max(self.now, self.earliest(node))
            node.done = self.now = node.ready + node.microseconds
            while self.waits and self.waits[0] < self.now:
                heapq.heappop(self.waits)
            if node.part != "kernel":
                self.in_flight = node.twin if node.part == "end" else None
            order.append(node)
            node.is_placed = True
            for source in node.sources:
                source.num_readers_left -= 1
                if not source.num_readers_left:
                    self.release(source)
                elif source.num_readers_left == 1:
                    last = next(reader for reader, _ in source.readers if not reader.is_placed)
                    last.num_last_reads += 1
                    if last.queue is not None:
                        last.queue.push(last)
        return order[::-1]

    def earliest(self, node: _Node) -> float:
        """The earliest time for a node after its readers: through a view, others may run before it."""
        times = (
            (max(reader.done, reader.ready + START_US) if node.position in reader.work.views else reader.ready)
            + latency
            for reader, latency in node.readers
        )
        return max(times, default=0.0)

    def release(self, node: _Node) -> None:
        """Make a node available whose readers are all placed."""
        node.ready = max(self.now, self.earliest(node))
        if node.work.is_view:
            self.views.append(node)
            return
        if node.ready > self.now:
            heapq.heappush(self.waits, node.ready)
        if node.part == "end" or node.work.communicates:
            self.ends.push(node)
        elif node.part == "start":
            self.start = node
        elif node.work.is_filled_late:
            self.constants.push(node)
        else:
            self.kernels.push(node)

    def next(self) -> _Node:
        """The best available node."""
        if self.views:
            return self.views.pop()
        wait = self.waits[0] - self.now if self.waits else None
        first = [self.constants, self.ends] if self.in_flight is None else [self.constants]
        for queue in first:
            if (time := queue.soonest(self.now)) is not None:
                return queue.take(time, wait)
        start, time = self.start, self.kernels.soonest(self.now)
        if time is None or (start is not None and max(start.ready, self.now) < time):
            return self.take_start()
        kernel = self.kernels.take(time, wait)
        if start is not None and start.ready <= time and self.is_preferred(start, kernel, wait):
            self.kernels.add_ready(kernel)
            return self.take_start()
        return kernel

    def take_start(self) -> _Node:
        """The start of the collective in flight."""
        start, self.start = self.start, None
        assert start is not None
        return start

    def is_preferred(self, start: _Node, kernel: _Node, wait: float | None) -> bool:
        """Whether a start whose latency is hidden goes before the best kernel: also where another collective waits for
        it, not where the kernel fills the time to a wait."""
        if self.ends.soonest(self.now) is not None:
            return True
        if start.depth != kernel.depth or not start.depth:
            return start.depth > kernel.depth
        if wait is not None and abs(wait - kernel.microseconds) < abs(wait - start.microseconds):
            return False
        return start.preference > kernel.preference
