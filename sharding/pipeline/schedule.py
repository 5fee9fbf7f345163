"""Pipeline schedules: tables of tasks to validate, simulate, plot and save."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from ..display.text_table import aligned
from .schedule_csv import read_csv, write_csv
from .simulation import Duration, Simulation, earliest_ticks, simulate
from .task_table import Task, TaskTable
from .validity import check


@dataclass(frozen=True, kw_only=True)
class Schedule(TaskTable):
    """The ordered tasks of each device. Plain data: compare schedules, edit them, write your own.

    Example:
        >>> order = [Task("forward", 0, 0), Task("backward", 0, 0)]
        >>> one = Schedule(name="mine", orders=[order], stages=1, microbatches=1)
        >>> one.check()
        >>> one.simulate().makespan
        3.0
    """

    def check(self) -> None:
        """Returns None for a schedule that can run.

        Raises:
            ShardingError: tasks that are out of range, missing or repeated; a microbatch whose tasks at a stage are on
                several devices or use several weight versions; a deadlock, including a wait for a weight version that
                is never ready. Each task is named with its device and its position there.
        """
        check(self)

    def simulate(
        self,
        *,
        forward: Duration = 1.0,
        backward: Duration = 2.0,
        weight: Duration | None = None,
        send: float = 0.0,
        lockstep: bool = False,
    ) -> Simulation:
        """The start and end of each task, each starting as early as this order allows.

        Args:
            forward: time of one microbatch, in any unit. A number is the time of one device's part of the model, of
                which a chunk or a slice takes its fraction; a sequence gives each stage's time; a function gives a
                task's time.
            backward: time of the full backward, likewise. Its two parts together take as long.
            weight: the part of ``backward`` spent on weight gradients; half of it by default.
            send: latency from the end of a task to the arrival of its result on another device; overlaps compute.
            lockstep: whether all devices start each task together, as in a single program with an exchange after every
                tick; a tick takes as long as its longest task plus ``send``.

        Raises:
            ShardingError: see ``check``; negative times; not one time per stage; ``weight`` above ``backward``.
        """
        return simulate(self, forward=forward, backward=backward, weight=weight, send=send, lockstep=lockstep)

    def ticks(self) -> tuple[tuple[Task | None, ...], ...]:
        """Per tick and device, the task to run or None: the table of a lockstep program.

        A device runs at most one task per tick; results arrive before the next tick.

        Raises:
            ShardingError: see ``check``.
        """
        found = check(self)
        tick = earliest_ticks(found)
        rows: list[list[Task | None]] = [[None] * self.devices for _ in range(max(tick) + 1)]
        for one, number in zip(found.located, tick, strict=True):
            rows[number][one.device] = one.task
        return tuple(map(tuple, rows))

    def split_backward(self) -> Schedule:
        """This schedule with each backward as backward-input followed directly by backward-weight.

        In lockstep all tasks then take about the same time, so that no device waits in a tick for another's backward.
        """
        return replace(self, orders=[[part for task in order for part in task.parts()] for order in self.orders])

    def __str__(self) -> str:
        """One line per device with the labels of its tasks: F forward, B backward, or its parts I and W."""
        labels = [[task.label for task in order] for order in self.orders]
        rows = list(zip(*zip_longest(*labels, fillvalue=""), strict=True))
        return "\n".join(aligned([[f"device {device}:", *row] for device, row in enumerate(rows)]))

    def to_csv(self, path: str | Path) -> None:
        """Writes one line per task, device by device in order, below a header line with the schedule's sizes."""
        write_csv(path, self)

    @classmethod
    def from_csv(cls, path: str | Path) -> Schedule:
        """Reads a schedule written by ``to_csv`` or by hand.

        Columns are ``device``, ``kind``, ``stage``, ``microbatch``, and optionally ``slice`` and ``version``; the lines
        of a device are in its order. An optional first line ``# {"chunks": 2, ...}`` gives the schedule's sizes; by
        default stages, microbatches and slices are those that occur. ``check`` tells whether the schedule can run.

        Raises:
            ShardingError: invalid columns, kinds or numbers, with their line.
        """
        return cls(**read_csv(path))
