"""Several pipelines, each with minibatches of its own, that exchange what they have learnt in waves (HetPipe).

A worker is a pipeline with `concurrent` minibatches under way. Its updates change its own weights as they are made. A
wave is `concurrent` minibatches in a row; when all of its last one is done the worker pushes the sum of the wave's
updates to the weights of all. A worker that has done c waves admits a minibatch only with the first c - D waves of
every worker in its weights, D being the clock distance. Where it hasn't them it waits until they are pushed and pulls
the weights of all, with everything that is in them by then. At any other time it goes on with what it has.

When what is pushed and pulled is decided by simulated time, not by a race: a run can be repeated.
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
from .table import at_least_one, is_count, whole_units
from .validity import check

ASKED = "pipeline.Waves"

Node = tuple[int, int]
"""(worker, number of a task of its schedule)."""


class Push(NamedTuple):
    """A wave of a worker that becomes part of the weights of all."""

    worker: int
    wave: int


@dataclass(frozen=True, kw_only=True)
class Waves:
    """Workers that may be so many waves apart.

    Example:
        >>> waves = Waves(stages=2, microbatches=8, concurrent=2, speeds=(1.0, 0.5), clock_distance=1)
        >>> waves.bound, waves.simulate().missing
        (4, (4, 4))
    """

    stages: int
    """Of each worker's pipeline."""
    microbatches: int
    """The paper's minibatches of each worker, a multiple of ``concurrent``."""
    speeds: tuple[float, ...]
    """Per worker, as a multiple of that for which times are given."""
    clock_distance: int = 0
    """Waves that workers may be apart."""
    concurrent: int | None = None
    """Minibatches of a worker under way, and those of a wave; ``stages`` where it is not given."""
    forward: Duration = 1.0
    """Of a minibatch, over 0; see ``Schedule.simulate``."""
    backward: Duration = 2.0
    """The same."""
    send: float = 0.0
    """From stage to stage; pushing and pulling take no time."""

    def __post_init__(self) -> None:
        """Raises for what can't be.

        Raises:
            ShardingError: see ``schedules.hetpipe``; microbatches that don't make whole waves; speeds or times that are
                not over 0.
        """
        object.__setattr__(self, "speeds", tuple(self.speeds))
        if not is_count(self.clock_distance) or self.clock_distance < 0:
            must = "a whole number from 0"
            raise ShardingError(f"{ASKED}(clock_distance)", there=repr(self.clock_distance), must=must)
        if not self.speeds or not all(isinstance(s, Real) and math.isfinite(s) and s > 0 for s in self.speeds):
            must = "a finite number over 0 for each worker"
            raise ShardingError(f"{ASKED}(speeds)", there=repr(self.speeds), must=must)
        at_least_one(ASKED, wave=self.wave)
        whole_units(ASKED, self.microbatches, self.wave, must="whole waves, so that all of them are pushed")
        if min(task_times(self.schedule, self.forward, self.backward, None)) <= 0:
            raise ShardingError(f"{ASKED}(forward, backward)", there="a task that takes no time", must="over 0")

    @property
    def workers(self) -> int:
        """How many."""
        return len(self.speeds)

    @property
    def wave(self) -> int:
        """Minibatches of a wave."""
        return self.stages if self.concurrent is None else self.concurrent

    @property
    def bound(self) -> int:
        """The most minibatches of another worker that one can miss: (D + 1)(s + 1) + s - 1, s being wave - 1."""
        local = self.wave - 1
        return (self.clock_distance + 1) * (local + 1) + local - 1

    @cached_property
    def schedule(self) -> Schedule:
        """Of each worker; versions count its own updates."""
        return schedules.hetpipe(stages=self.stages, microbatches=self.microbatches, concurrent=self.wave)

    def waves_needed(self, microbatch: int) -> int:
        """Of every worker, so many must be in the weights with which a worker admits its minibatch."""
        waves_done = (microbatch + 1) // self.wave - 1
        return max(0, waves_done - self.clock_distance)

    def simulate(self) -> WaveSimulation:
        """When each worker does what, and what of the others is in its weights."""
        return _simulate(self)


@dataclass(frozen=True, kw_only=True)
class WaveSimulation:
    """Workers whose tasks have times."""

    waves: Waves
    workers: tuple[Simulation, ...]
    """Per worker, all with the same clock."""
    pushes: tuple[Push, ...]
    """In the order of time; at the same time in that of the workers."""
    pulls: tuple[dict[int, int], ...]
    """Per worker, at which of its minibatches it pulls, and how many pushes it gets."""

    @property
    def makespan(self) -> float:
        """Until the last worker is done."""
        return max(worker.makespan for worker in self.workers)

    @property
    def missing(self) -> tuple[int, ...]:
        """Per worker, the most minibatches of another that were missing in the weights of one of its own.

        Those are meant that come before it in the other's count.
        """
        return tuple(max(self.missed(worker)) for worker in range(self.waves.workers))

    def missed(self, worker: int) -> tuple[int, ...]:
        """Per minibatch of a worker, the most minibatches of another that are missing in its weights."""
        others = [other for other in range(self.waves.workers) if other != worker]
        found, pushes = [], 0
        for microbatch in range(self.waves.microbatches):
            pushes = self.pulls[worker].get(microbatch, pushes)
            seen = [sum(push.worker == other for push in self.pushes[:pushes]) * self.waves.wave for other in others]
            found.append(max([0, *(microbatch - count for count in seen)]))
        return tuple(found)


def _simulate(waves: Waves) -> WaveSimulation:
    """Each task as early as its device, what it waits for, and the waves of others allow."""
    clock = _Clock(waves)
    order = sorted(clock.all_pushes, key=lambda push: (clock.moment(push), push))
    return WaveSimulation(
        waves=waves,
        workers=tuple(clock.simulation(worker) for worker in range(waves.workers)),
        pushes=tuple(order),
        pulls=tuple(dict(clock.pulls(worker, order)) for worker in range(waves.workers)),
    )


class _Clock:
    """When the tasks of all workers begin and end."""

    def __init__(self, waves: Waves):
        self.waves, self.found = waves, check(waves.schedule)
        self.numbers = {(t.kind, t.stage, t.microbatch): number for number, (t, *_) in enumerate(self.found.located)}
        self.starts: dict[Node, float] = {}
        self.ends: dict[Node, float] = {}
        taken = task_times(waves.schedule, waves.forward, waves.backward, None)
        nodes = [(worker, task) for worker in range(waves.workers) for task in range(len(taken))]
        graph = {node: list(self.awaited(*node)) for node in nodes}
        for node in graphlib.TopologicalSorter(graph).static_order():
            worker, task = node
            self.starts[node] = max([0.0, *(self.arrival(one, worker, task) for one in graph[node])])
            self.ends[node] = self.starts[node] + taken[task] / waves.speeds[worker]

    @property
    def all_pushes(self) -> list[Push]:
        """Of all workers, in their order."""
        count = self.waves.microbatches // self.waves.wave
        return [Push(worker, wave) for worker in range(self.waves.workers) for wave in range(count)]

    def pushing(self, push: Push) -> Node:
        """The task at whose end a wave is pushed."""
        return push.worker, self.numbers["backward", 0, (push.wave + 1) * self.waves.wave - 1]

    def moment(self, push: Push) -> float:
        """When a wave is pushed."""
        return self.ends[self.pushing(push)]

    def awaited(self, worker: int, task: int) -> Iterator[Node]:
        """What a task waits for: in its own pipeline, and waves of other workers."""
        last = self.found.before[task]
        yield from ((worker, one) for one in (*self.found.needs[task], *(() if last is None else (last,))))
        kind, stage, microbatch, *_ = self.found.located[task].task
        needed = self.waves.waves_needed(microbatch)
        if kind == "forward" and stage == 0 and needed:
            yield from (self.pushing(Push(other, needed - 1)) for other in self.others(worker))

    def arrival(self, node: Node, worker: int, task: int) -> float:
        """When what a task waits for is there: at once, but for what another device of its pipeline sends."""
        source, here = self.found.located[node[1]].device, self.found.located[task].device
        return self.ends[node] + (self.waves.send if node[0] == worker and source != here else 0.0)

    def others(self, worker: int) -> Iterator[int]:
        """All workers but one."""
        return (other for other in range(self.waves.workers) if other != worker)

    def pulls(self, worker: int, order: list[Push]) -> Iterator[tuple[int, int]]:
        """At which minibatches a worker pulls, and how many pushes it gets."""
        have = 0 if self.waves.workers > 1 else math.inf
        for microbatch in range(self.waves.microbatches):
            if self.waves.waves_needed(microbatch) > have:
                start = self.starts[worker, self.numbers["forward", 0, microbatch]]
                pushed = [push.worker for push in order if self.moment(push) <= start]
                have = min(pushed.count(other) for other in self.others(worker))
                yield microbatch, len(pushed)

    def simulation(self, worker: int) -> Simulation:
        """One worker's."""
        starts: list[list[float]] = [[] for _ in self.waves.schedule.orders]
        ends: list[list[float]] = [[] for _ in self.waves.schedule.orders]
        for task, one in enumerate(self.found.located):
            starts[one.device].append(self.starts[worker, task])
            ends[one.device].append(self.ends[worker, task])
        return Simulation(table=self.waves.schedule, starts=tuple(map(tuple, starts)), ends=tuple(map(tuple, ends)))
