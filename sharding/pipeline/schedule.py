"""A pipeline schedule: a table of tasks that can be checked, timed, drawn and kept in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from ..columns import aligned
from .file import read_csv, write_csv
from .simulation import Duration, Simulation, simulate, ticks
from .table import Table, Task
from .validity import check


@dataclass(frozen=True, kw_only=True)
class Schedule(Table):
    """Which device does which task in which order. Plain data: compare it, change it, write your own.

    Example:
        >>> order = [Task("forward", 0, 0), Task("backward", 0, 0)]
        >>> one = Schedule(name="mine", orders=[order], stages=1, microbatches=1)
        >>> one.check()
        >>> one.simulate().makespan
        3.0
    """

    def check(self) -> None:
        """Returns None where every task can be done.

        Raises:
            ShardingError: a task that is not one of this schedule, is missing or is there twice; a microbatch whose
                tasks at a stage are on several devices or use several versions of the weights; a version that is not
                there yet, and other tasks that wait for each other. Each is named with its device and its place there.
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
        """When each task runs, if each runs as early as it can in this order.

        Args:
            forward: of one microbatch, in any unit. A number is for one device's part of the model, of which a chunk
                and a slice take their share; a sequence has the time of each stage; a function gives that of a task.
            backward: the whole of it, for the same. Its parts together take as long.
            weight: the part of ``backward`` that is for the weights; half of it where it is not given.
            send: from the end of a task to the arrival of its result on another device, which computes meanwhile.
            lockstep: whether all devices begin every task together, as in one program that exchanges results after
                each; such a tick takes as long as its longest task, and ``send``.

        Raises:
            ShardingError: see ``check``; times that are negative or not one per stage; ``weight`` over ``backward``.
        """
        return simulate(self, forward=forward, backward=backward, weight=weight, send=send, lockstep=lockstep)

    def ticks(self) -> tuple[tuple[Task | None, ...], ...]:
        """Per tick and device the task that it does then, or None: what a program in lockstep reads.

        In a tick a device does at most one task; results arrive before the next.

        Raises:
            ShardingError: see ``check``.
        """
        found = check(self)
        tick = ticks(found)
        rows: list[list[Task | None]] = [[None] * self.devices for _ in range(max(tick) + 1)]
        for one, number in zip(found.located, tick, strict=True):
            rows[number][one.device] = one.task
        return tuple(map(tuple, rows))

    def split_backward(self) -> Schedule:
        """The same with each whole backward as its two parts, one right after the other.

        In lockstep all tasks then take about as long, so that no device waits in a tick for another's whole backward.
        """
        return replace(self, orders=[[part for task in order for part in task.parts()] for order in self.orders])

    def __str__(self) -> str:
        """A line per device with its tasks' labels in their order: F forward, B backward, or its parts I and W."""
        labels = [[task.label for task in order] for order in self.orders]
        rows = list(zip(*zip_longest(*labels, fillvalue=""), strict=True))
        return "\n".join(aligned([[f"device {device}:", *row] for device, row in enumerate(rows)]))

    def to_csv(self, path: str | Path) -> None:
        """Writes a line per task, device by device in their order, under a line with the numbers of the whole."""
        write_csv(path, self)

    @classmethod
    def from_csv(cls, path: str | Path) -> Schedule:
        """The schedule in a file: ``to_csv``'s, or your own.

        Columns are ``device``, ``kind``, ``stage``, ``microbatch``, and where they matter ``slice`` and ``version``;
        the lines of a device are in its order. A first line ``# {"chunks": 2, ...}`` can have the numbers of the whole;
        stages, microbatches and slices are otherwise those that occur. Whether the schedule can run, ``check`` says.

        Raises:
            ShardingError: columns, kinds or numbers that aren't, with their line.
        """
        return cls(**read_csv(path))
