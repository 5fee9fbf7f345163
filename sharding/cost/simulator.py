"""Discrete-event simulation of a step with overlapping compute and communication.

A task runs on one stream: the compute of a device, a link, a copy engine. A stream runs one task at a time, first come
first served in the order in which tasks become ready; a task is ready when all its dependencies have ended. This is the
simulator of Jia, Zaharia and Aiken, Beyond Data and Model Parallelism for Deep Neural Networks (MLSys 2019), section 5:
`simulate` is its full algorithm, `Timeline.with_seconds` its delta algorithm, which re-times only the tasks affected by
changed durations.

Tasks that become ready at the same time run in topological order, ties broken by the order given. With the pairs
(ready time, topological index) as keys, a task has a larger key than its dependencies and than its predecessor on its
stream; so a unique timeline satisfies for every task

    ready = latest end of its dependencies,   start = max(ready, end of its predecessor),   end = start + seconds

and both algorithms compute exactly that one.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import ShardingError

Key = tuple[float, int]
"""(time at which a task is ready, its topological index)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A unit of work on a stream."""

    name: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()
    """Names of the tasks it depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Start and end of a task."""

    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class _TaskGraph:
    """The tasks in topological order, and their dependencies by index."""

    tasks: tuple[Task, ...]
    numbers: Mapping[str, int]
    dependencies: tuple[tuple[int, ...], ...]
    dependents: tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class Timeline:
    """A simulated step."""

    _graph: _TaskGraph
    _seconds: list[float]
    _ready: list[float]
    _ends: list[float]
    _queues: dict[str, list[Key]]
    """Per stream its tasks in execution order."""
    num_timed: int = field(default=0)
    """Task timings that the simulation took; the full algorithm times each task once."""

    @property
    def makespan_seconds(self) -> float:
        """End of the last task."""
        return max(self._ends, default=0.0)

    def __getitem__(self, name: str) -> Span:
        number = self._graph.numbers[name]
        return Span(start_seconds=self._start(number), end_seconds=self._ends[number])

    @property
    def spans(self) -> dict[str, Span]:
        """Task name -> its span, in topological order."""
        return {task.name: self[task.name] for task in self._graph.tasks}

    @property
    def streams(self) -> dict[str, tuple[str, ...]]:
        """Stream -> its tasks in execution order."""
        tasks = self._graph.tasks
        return {name: tuple(tasks[number].name for _, number in queue) for name, queue in self._queues.items()}

    def busy_seconds(self, stream: str) -> float:
        """Total task time of a stream."""
        return sum(self._seconds[number] for _, number in self._queues[stream])

    def idle_seconds(self, stream: str) -> float:
        """Time of the step in which a stream runs no task."""
        return self.makespan_seconds - self.busy_seconds(stream)

    def critical_path(self) -> tuple[str, ...]:
        """Tasks that run back to back from the start to the end of the step.

        Each starts when the previous one ends, which is a dependency or its predecessor on its stream.
        """
        if not self._ends:
            return ()
        path = [max(range(len(self._ends)), key=lambda number: (self._ends[number], -number))]
        while (cause := self._cause(path[-1])) is not None:
            path.append(cause)
        return tuple(self._graph.tasks[number].name for number in reversed(path))

    def with_seconds(self, changes: Mapping[str, float]) -> Timeline:
        """The timeline with changed durations; re-times only affected tasks.

        Args:
            changes: task name -> new seconds.

        Raises:
            ShardingError: if a task is unknown or a duration is not a finite number >= 0.
        """
        _check_changes(changes, self._graph.numbers)
        seconds = list(self._seconds)
        changed = {self._graph.numbers[name]: value for name, value in changes.items()}
        for number, value in changed.items():
            seconds[number] = value
        dirty = [number for number in changed if seconds[number] != self._seconds[number]]
        queues = dict(self._queues)
        new = Timeline(self._graph, seconds, list(self._ready), list(self._ends), queues)
        if _retime(new, dirty):
            return new
        again = _simulate_all(self._graph, seconds)
        again.num_timed += new.num_timed
        return again

    def _start(self, number: int) -> float:
        return max(self._ready[number], self._end_before(number))

    def _end_before(self, number: int) -> float:
        """End of the task's predecessor on its stream; 0 if it is the first."""
        queue = self._queues[self._graph.tasks[number].stream]
        index = bisect.bisect_left(queue, (self._ready[number], number))
        return self._ends[queue[index - 1][1]] if index else 0.0

    def _cause(self, number: int) -> int | None:
        """A task whose end determines this one's start; None if it starts the step."""
        start = self._start(number)
        if start == 0.0 and not self._graph.dependencies[number]:
            queue = self._queues[self._graph.tasks[number].stream]
            index = bisect.bisect_left(queue, (self._ready[number], number))
            return queue[index - 1][1] if index else None
        for other in self._graph.dependencies[number]:
            if self._ends[other] == start:
                return other
        queue = self._queues[self._graph.tasks[number].stream]
        return queue[bisect.bisect_left(queue, (self._ready[number], number)) - 1][1]


def simulate(tasks: Iterable[Task]) -> Timeline:
    """The timeline of tasks, each started as early as its stream and dependencies allow.

    Raises:
        ShardingError: for duplicate names, unknown or cyclic dependencies, or durations that are not finite and >= 0.
    """
    graph = _graph(tuple(tasks))
    return _simulate_all(graph, [task.seconds for task in graph.tasks])


def _simulate_all(graph: _TaskGraph, seconds: list[float]) -> Timeline:
    """Time every task once, in the order of the keys."""
    count = len(graph.tasks)
    ready, ends, waiting = [0.0] * count, [0.0] * count, [len(dependencies) for dependencies in graph.dependencies]
    queues: dict[str, list[Key]] = {task.stream: [] for task in graph.tasks}
    heap: list[Key] = [(0.0, number) for number in range(count) if not waiting[number]]
    while heap:
        key = heapq.heappop(heap)
        ready[key[1]], number = key
        queue = queues[graph.tasks[number].stream]
        ends[number] = max(key[0], ends[queue[-1][1]] if queue else 0.0) + seconds[number]
        queue.append(key)
        for dependent in graph.dependents[number]:
            waiting[dependent] -= 1
            if not waiting[dependent]:
                heapq.heappush(heap, (max(ends[other] for other in graph.dependencies[dependent]), dependent))
    return Timeline(graph, seconds, ready, ends, queues, num_timed=count)


MOST_ROUNDS = 4
"""Timings per task after which a change is simulated in full, as it affects nearly everything."""


def _retime(timeline: Timeline, dirty: Sequence[int]) -> bool:
    """Re-time tasks until each satisfies its equations; False if that takes longer than a full simulation.

    Tasks are processed in the order of their keys, so most are timed once; a task timed before one of its dependencies
    is timed again.
    """
    graph, ready, ends, queues = timeline._graph, timeline._ready, timeline._ends, timeline._queues
    copied: set[str] = set()
    heap: list[Key] = [(ready[number], number) for number in dirty]
    heapq.heapify(heap)
    waiting = set(dirty)

    def push(number: int) -> None:
        if number not in waiting:
            waiting.add(number)
            heapq.heappush(heap, (_ready(timeline, number), number))

    while heap:
        _, number = heapq.heappop(heap)
        waiting.discard(number)
        timeline.num_timed += 1
        if timeline.num_timed > MOST_ROUNDS * len(graph.tasks):
            return False
        stream = graph.tasks[number].stream
        if stream not in copied:  # queues are shared with the original timeline
            copied.add(stream)
            queues[stream] = list(queues[stream])
        queue = queues[stream]
        ready_seconds, key = _ready(timeline, number), (ready[number], number)
        index = bisect.bisect_left(queue, key)
        if ready_seconds != ready[number]:
            del queue[index]
            if index < len(queue):
                push(queue[index][1])  # its former successor
            ready[number] = ready_seconds
            index = bisect.bisect_left(queue, (ready_seconds, number))
            queue.insert(index, (ready_seconds, number))
            if index + 1 < len(queue):
                push(queue[index + 1][1])
        end = max(ready_seconds, ends[queue[index - 1][1]] if index else 0.0) + timeline._seconds[number]
        if end != ends[number]:
            ends[number] = end
            for dependent in graph.dependents[number]:
                push(dependent)
            if index + 1 < len(queue):
                push(queue[index + 1][1])
    return True


def _ready(timeline: Timeline, number: int) -> float:
    return max((timeline._ends[other] for other in timeline._graph.dependencies[number]), default=0.0)


def _graph(tasks: tuple[Task, ...]) -> _TaskGraph:
    index_of = {task.name: index for index, task in enumerate(tasks)}
    _check(tasks, index_of)
    dependencies = [[index_of[name] for name in dict.fromkeys(task.after)] for task in tasks]
    dependents: list[list[int]] = [[] for _ in tasks]
    for index, own in enumerate(dependencies):
        for other in own:
            dependents[other].append(index)
    if all(max(own, default=-1) < index for index, own in enumerate(dependencies)):  # in a topological order already
        return _TaskGraph(
            tasks=tasks,
            numbers=index_of,
            dependencies=tuple(map(tuple, dependencies)),
            dependents=tuple(map(tuple, dependents)),
        )
    waiting = list(map(len, dependencies))
    order, heap = [], [index for index, count in enumerate(waiting) if not count]
    while heap:
        index = heapq.heappop(heap)
        order.append(index)
        for dependent in dependents[index]:
            waiting[dependent] -= 1
            if not waiting[dependent]:
                heapq.heappush(heap, dependent)
    if len(order) < len(tasks):
        cyclic = [tasks[index].name for index, count in enumerate(waiting) if count]
        raise ShardingError(
            "a simulation", found=f"cyclic dependencies: {', '.join(cyclic[:8])}", required="an acyclic task graph"
        )
    numbers = {tasks[index].name: number for number, index in enumerate(order)}
    return _TaskGraph(
        tasks=tuple(tasks[index] for index in order),
        numbers=numbers,
        dependencies=tuple(tuple(numbers[tasks[other].name] for other in dependencies[index]) for index in order),
        dependents=tuple(tuple(sorted(numbers[tasks[other].name] for other in dependents[index])) for index in order),
    )


def _check(tasks: Sequence[Task], index_of: Mapping[str, int]) -> None:
    faults = [f"duplicate task {task.name!r}" for index, task in enumerate(tasks) if index_of[task.name] != index]
    faults += [
        f"{task.name!r} after unknown task {name!r}" for task in tasks for name in task.after if name not in index_of
    ]
    faults += [f"{task.name!r} of {task.seconds!r} seconds" for task in tasks if not _is_duration(task.seconds)]
    if faults:
        raise ShardingError(
            "a simulation", found=faults[:8], required="unique names, known dependencies, finite seconds >= 0"
        )


def _check_changes(changes: Mapping[str, float], numbers: Mapping[str, int]) -> None:
    faults = [f"unknown task {name!r}" for name in changes if name not in numbers]
    faults += [f"{name!r} of {value!r} seconds" for name, value in changes.items() if not _is_duration(value)]
    if faults:
        raise ShardingError("a changed simulation", found=faults[:8], required="known tasks, finite seconds >= 0")


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
