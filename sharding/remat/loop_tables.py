"""Schedules as loops: what is run, stored and restored before the backward of each group of steps, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from .actions import Action, Advance, Backward, Free, Record, Restore, Snapshot
from .checkpoint_schedule import Schedule


class Push(NamedTuple):
    """Steps to run forward, after which the state is stored."""

    steps: int
    slot: int


@dataclass(slots=True)
class Turn:
    """A group of consecutive steps, and how the state before it is reached."""

    slot: int
    """The snapshot to start from."""
    state: int
    """Its state."""
    pushes: list[Push] = field(default_factory=list)
    advance: int = 0
    """Steps forward after the last push."""
    steps: list[int] = field(default_factory=list)
    """The group: recorded together, then run backward together."""

    @property
    def start(self) -> int:
        """The first step of the group."""
        return self.steps[0]


@dataclass(frozen=True, slots=True)
class LoopTables:
    """The turns of a schedule, in the order in which they run: the last steps first."""

    turns: tuple[Turn, ...]
    slots: int
    """Snapshots held at once."""

    def runs(self) -> list[list[Turn]]:
        """The turns after the first, in runs of groups of equal length."""
        return [list(run) for _, run in groupby(self.turns[1:], key=lambda turn: len(turn.steps))]


def loop_tables(schedule: Schedule) -> LoopTables | None:
    """The turns of a schedule; None if other steps run while a group's records are held, or with other places."""
    reader = _Reader()
    fits = all(reader.read(action) for action in schedule.actions)
    return LoopTables(tuple(reader.turns), reader.most) if fits else None


@dataclass(slots=True)
class _Reader:
    turns: list[Turn] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    """State -> slot."""
    most: int = 0
    turn: Turn = field(default_factory=lambda: Turn(0, 0))
    left: list[int] = field(default_factory=list)
    """Steps of the newest turn whose backward is still to come."""

    def read(self, action: Action) -> bool:
        """Whether the action fits a turn."""
        match action:
            case Snapshot(_, place) if place != "device":
                return False
            case Snapshot(0) if not self.slots:
                self._store(0)
            case Snapshot(state):
                self.turn.pushes.append(Push(self.turn.advance, self._store(state)))
                self.turn.advance = 0
                return not self.turn.steps and self.turn.pushes[-1].steps > 0
            case Advance(start, stop):
                self.turn.advance += stop - start
                return not self.turn.steps
            case Restore(state):
                self.turn = Turn(self.slots.get(state, 0), state)
                return state in self.slots and not self.left
            case Free(state):
                del self.slots[state]
            case Record(step):
                self.turn.steps.append(step)
            case Backward(step):
                return self._backward(step)
        return True

    def _store(self, state: int) -> int:
        slot = next(slot for slot in range(len(self.slots) + 1) if slot not in self.slots.values())
        self.slots[state] = slot
        self.most = max(self.most, len(self.slots))
        return slot

    def _backward(self, step: int) -> bool:
        if not self.left:
            self.turn.steps = self.turn.steps or [step]
            self.turns.append(self.turn)
            self.left = list(self.turn.steps)
            self.turn = Turn(0, -1)
        return self.left.pop() == step
