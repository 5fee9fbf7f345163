"""`Schedule`: which states of a chain are stored, and what is recomputed, as a list of actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..display import Column, Table, Tabular
from ..display.chart import Chart
from ..display.units import bytes_text
from ..errors import ShardingError
from .action_chart import chart
from .actions import Action, Advance, Backward, Record
from .chain import Chain
from .replay import replay

SHOWN = 40
"""Actions that are printed."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule(Tabular):
    """The actions of a forward and backward pass over a chain of steps. Plain data: compare, edit, write your own.

    Example:
        >>> from sharding import remat
        >>> s = remat.revolve(10, snapshots=3)
        >>> s.forwards, s.evaluations, s.snapshots
        (15, 25, 3)
        >>> remat.revolve(3, snapshots=1)
        revolve: 3 steps, 3 forwards, 1 snapshot
          #  action       held
          0  snapshot 0      1
          1  advance 0-2     1
          2  backward 2      1
          3  restore 0       1
          4  advance 0-1     1
          5  backward 1      1
          6  restore 0       1
          7  backward 0      1
          8  free 0          0
    """

    name: str
    """The algorithm."""
    steps: int
    actions: tuple[Action, ...]
    chain: Chain | None = None
    """The costs and sizes that it was made for."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(self.actions))
        check_count(f"remat.Schedule({self.name}): steps", self.steps)

    def check(self) -> None:
        """Returns None for a schedule that can run.

        Raises:
            ShardingError: an action without what it needs; a step without its backward; a state that is never freed.
        """
        for _ in replay(self.name, self.steps, self.actions):
            pass

    @cached_property
    def forwards(self) -> int:
        """Steps that are computed forward by `Advance` and `Record`.

        A backward without a record runs its own step forward first, which is not counted here: Revolve's convention.
        """
        return sum(a.stop - a.start if isinstance(a, Advance) else isinstance(a, Record) for a in self.actions)

    @cached_property
    def evaluations(self) -> int:
        """All runs of steps forward: `forwards`, and one for each backward without a record."""
        recorded = sum(isinstance(action, Record) for action in self.actions)
        return self.forwards + sum(isinstance(action, Backward) for action in self.actions) - recorded

    @cached_property
    def snapshots(self) -> int:
        """The most states held at once: snapshots, and the records of steps.

        Raises:
            ShardingError: as `check`.
        """
        return max(self._held)

    @cached_property
    def _held(self) -> tuple[int, ...]:
        return tuple(memory.num_held for _, _, memory in replay(self.name, self.steps, self.actions))

    @cached_property
    def peak_bytes(self) -> int | None:
        """The most bytes held at once: states, records and gradients; None without the sizes of a `chain`.

        Raises:
            ShardingError: as `check`.
        """
        if self.chain is None:
            return None
        return max(self.chain.bytes_during(self.name, self.actions))

    @cached_property
    def cost(self) -> float | None:
        """The costs of all steps run forward and backward; None without those of a `chain`."""
        return None if self.chain is None else self.chain.cost(self.actions)

    def plot(self) -> Chart:
        """What is held when, displayed by notebooks: a row per state, time in steps.

        Raises:
            ShardingError: as `check`.
        """
        return chart(self.title, self.name, self.steps, self.actions)

    @property
    def title(self) -> str:
        """One line: the algorithm and its counts."""
        parts = [_counted(self.steps, "step"), _counted(self.forwards, "forward"), _counted(self.snapshots, "snapshot")]
        if self.peak_bytes is not None:
            parts.append(f"peak {bytes_text(self.peak_bytes)}")
        return f"{self.name}: {', '.join(parts)}"

    def tables(self) -> list[Table]:
        """One row per action: its number, the action, and the states held after it."""
        return [self._table(range(len(self.actions)))]

    def _table(self, numbers: Sequence[int]) -> Table:
        columns = (Column("#", "number"), Column("action"), Column("held", "number"))
        return Table(self.title, columns, [(n, str(self.actions[n]), self._held[n]) for n in numbers])

    def __str__(self) -> str:
        first, *rows = str(self._table(range(min(len(self.actions), SHOWN)))).splitlines()
        left = len(self.actions) - SHOWN
        more = [f"and {left:,} more: .actions"] if left > 0 else []
        return "\n".join([first, *(f"  {row}" for row in (*rows, *more))])

    __repr__ = __str__


def check_count(asked: str, value: int, least: int = 1) -> None:
    """Raises unless `value` is an integer of at least `least`.

    Raises:
        ShardingError: it is not.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ShardingError(asked, found=repr(value), required=f"an integer of at least {least}", fix=str(least))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
