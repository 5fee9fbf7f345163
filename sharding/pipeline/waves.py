"""Wave synchronous parallel (HetPipe): several pipelines, each on its own minibatches, that exchange updates in waves.

A virtual worker is a pipeline with `concurrent` minibatches in flight. It applies its updates to its local weights as
they are computed. A wave is `concurrent` consecutive minibatches; when its last one completes, the worker pushes the
sum of the wave's updates to the global weights. A worker that has completed c waves admits a minibatch only if its
weights include the first c - D waves of every worker, D being the clock distance. Otherwise it waits until they are
pushed and pulls the global weights, with everything pushed by then. At all other times it continues with what it has.

Pushes and pulls follow simulated time, not a race: runs are reproducible.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import NamedTuple

from ..errors import ShardingError
from . import schedules
from .schedule import Schedule
from .simulation import Duration, Simulation, task_times
from .task_table import check_multiple, check_positive, is_integer
from .validity import check

ASKED = "pipeline.Waves"

Node = tuple[int, int]
"""(worker, index of a task of its schedule)."""


class Push(NamedTuple):
    """A wave that a worker adds to the global weights."""

    worker: int
    wave: int


@dataclass(frozen=True, kw_only=True)
class Waves:
    """Virtual workers with a bounded clock distance.

    Example:
        >>> waves = Waves(stages=2, microbatches=8, concurrent=2, speeds=(1.0, 0.5), clock_distance=1)
        >>> waves.bound, waves.simulate().missing
        (4, (4, 4))
    """

    stages: int
    """Stages of each worker's pipeline."""
    microbatches: int
    """The paper's minibatches per worker, a multiple of ``concurrent``."""
    speeds: tuple[float, ...]
    """Per worker, relative to the speed for which times are given."""
    clock_distance: int = 0
    """Waves by which workers may be apart."""
    concurrent: int | None = None
    """Minibatches of a worker in flight, and per wave; defaults to ``stages``."""
    forward: Duration = 1.0
    """Time of a minibatch, positive; see ``Schedule.simulate``."""
    backward: Duration = 2.0
    """Likewise."""
    send: float = 0.0
    """Latency from stage to stage; pushes and pulls take no time."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
            ShardingError: see ``schedules.hetpipe``; microbatches that are not a multiple of the wave; speeds or times
                that are not positive.
        """
        object.__setattr__(self, "speeds", tuple(self.speeds))
        if not is_integer(self.clock_distance) or self.clock_distance < 0:
            must = "a non-negative integer"
            raise ShardingError(f"{ASKED}(clock_distance)", found=repr(self.clock_distance), required=must)
        if not self.speeds or not all(isinstance(s, Real) and math.isfinite(s) and s > 0 for s in self.speeds):
            must = "one finite positive number per worker"
            raise ShardingError(f"{ASKED}(speeds)", found=repr(self.speeds), required=must)
        check_positive(ASKED, wave=self.wave)
        check_multiple(
            ASKED, self.microbatches, self.wave, required=f"a multiple of {self.wave}, the minibatches per wave"
        )
        if min(task_times(self.schedule, self.forward, self.backward, None)) <= 0:
            raise ShardingError(f"{ASKED}(forward, backward)", found="a task of zero time", required="positive times")

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.speeds)

    @property
    def wave(self) -> int:
        """Minibatches per wave."""
        return self.stages if self.concurrent is None else self.concurrent

    @property
    def bound(self) -> int:
        """The bound on another worker's minibatches that a worker lacks: (D + 1)(s + 1) + s - 1 with s = wave - 1."""
        local = self.wave - 1
        return (self.clock_distance + 1) * (local + 1) + local - 1

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of each worker; its versions count the worker's own updates."""
        return schedules.hetpipe(stages=self.stages, microbatches=self.microbatches, concurrent=self.wave)

    def waves_needed(self, microbatch: int) -> int:
        """The waves of every worker that must be in a worker's weights when it admits its `microbatch`."""
        waves_done = (microbatch + 1) // self.wave - 1
        return max(0, waves_done - self.clock_distance)

    def simulate(self) -> WaveSimulation:
        """Times of each worker's tasks, and the order of pushes and pulls."""
        return _simulate(self)


@dataclass(frozen=True, kw_only=True)
class WaveSimulation:
    """Workers with start and end times."""

    waves: Waves
    workers: tuple[Simulation, ...]
    """One per worker, on a common clock."""
    pushes: tuple[Push, ...]
    """In order of time, then of worker."""
    pulls: tuple[dict[int, int], ...]
    """Per worker, the minibatches at which it pulls, and the number of pushes that it receives."""

    @property
    def makespan(self) -> float:
        """Time until the last worker finishes."""
        return max(worker.makespan for worker in self.workers)

    @property
    def missing(self) -> tuple[int, ...]:
        """Per worker, the maximum number of another worker's minibatches lacking in the weights of one of its own.

        Only minibatches with a lower index count.
        """
        return tuple(max(self.missed(worker)) for worker in range(self.waves.workers))

    def missed(self, worker: int) -> tuple[int, ...]:
        """Per minibatch of a worker, the maximum number of another worker's minibatches lacking in its weights."""
        others = [other for other in range(self.waves.workers) if other != worker]
        found, pushes = [], 0
        for microbatch in range(self.waves.microbatches):
            pushes = self.pulls[worker].get(microbatch, pushes)
            seen = [sum(push.worker == other for push in self.pushes[:pushes]) * self.waves.wave for other in others]
            found.append(max([0, *(microbatch - count for count in seen)]))
        return tuple(found)


def _simulate(waves: Waves) -> WaveSimulation:
    """Runs each task as early as its device, its dependencies and other workers' waves allow."""
    clock = _Clock(waves)
    order = sorted(clock.all_pushes, key=lambda push: (clock.push_time(push), push))
    return WaveSimulation(
        waves=waves,
        workers=tuple(clock.simulation(worker) for worker in range(waves.workers)),
        pushes=tuple(order),
        pulls=tuple(dict(clock.pulls(worker, order)) for worker in range(waves.workers)),
    )


class _Clock:
    """Start and end times of all workers' tasks."""

    def __init__(self, waves: Waves):
        self.waves, self.found = waves, check(waves.schedule)
        self.numbers = {(t.kind, t.stage, t.microbatch): number for number, (t, *_) in enumerate(self.found.located)}
        self.starts: dict[Node, float] = {}
        self.ends: dict[Node, float] = {}
        taken = task_times(waves.schedule, waves.forward, waves.backward, None)
        nodes = [(worker, task) for worker in range(waves.workers) for task in range(len(taken))]
        graph = {node: list(self.predecessors(*node)) for node in nodes}
        for node in graphlib.TopologicalSorter(graph).static_order():
            worker, task = node
            self.starts[node] = max([0.0, *(self.arrival_time(one, worker, task) for one in graph[node])])
            self.ends[node] = self.starts[node] + taken[task] / waves.speeds[worker]

    @property
    def all_pushes(self) -> list[Push]:
        """The pushes of all workers, worker by worker."""
        count = self.waves.microbatches // self.waves.wave
        return [Push(worker, wave) for worker in range(self.waves.workers) for wave in range(count)]

    def push_task(self, push: Push) -> Node:
        """The task whose end pushes a wave."""
        return push.worker, self.numbers["backward", 0, (push.wave + 1) * self.waves.wave - 1]

    def push_time(self, push: Push) -> float:
        """The time of a push."""
        return self.ends[self.push_task(push)]

    def predecessors(self, worker: int, task: int) -> Iterator[Node]:
        """The dependencies of a task: in its own pipeline, and on other workers' waves."""
        last = self.found.before[task]
        yield from ((worker, one) for one in (*self.found.needs[task], *(() if last is None else (last,))))
        kind, stage, microbatch, *_ = self.found.located[task].task
        needed = self.waves.waves_needed(microbatch)
        if kind == "forward" and stage == 0 and needed:
            yield from (self.push_task(Push(other, needed - 1)) for other in self.others(worker))

    def arrival_time(self, node: Node, worker: int, task: int) -> float:
        """When the result of `node` is available to a task: at once, or after `send` from another device."""
        source, here = self.found.located[node[1]].device, self.found.located[task].device
        return self.ends[node] + (self.waves.send if node[0] == worker and source != here else 0.0)

    def others(self, worker: int) -> Iterator[int]:
        """All other workers."""
        return (other for other in range(self.waves.workers) if other != worker)

    def pulls(self, worker: int, order: list[Push]) -> Iterator[tuple[int, int]]:
        """The minibatches at which a worker pulls, and the number of pushes that it receives."""
        have = 0 if self.waves.workers > 1 else math.inf
        for microbatch in range(self.waves.microbatches):
            if self.waves.waves_needed(microbatch) > have:
                start = self.starts[worker, self.numbers["forward", 0, microbatch]]
                pushed = [push.worker for push in order if self.push_time(push) <= start]
                have = min(pushed.count(other) for other in self.others(worker))
                yield microbatch, len(pushed)

    def simulation(self, worker: int) -> Simulation:
        """The times of one worker."""
        starts: list[list[float]] = [[] for _ in self.waves.schedule.orders]
        ends: list[list[float]] = [[] for _ in self.waves.schedule.orders]
        for task, one in enumerate(self.found.located):
            starts[one.device].append(self.starts[worker, task])
            ends[one.device].append(self.ends[worker, task])
        return Simulation(table=self.waves.schedule, starts=tuple(map(tuple, starts)), ends=tuple(map(tuple, ends)))
