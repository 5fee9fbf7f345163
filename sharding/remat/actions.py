"""The actions of a recomputation schedule.

A chain of steps 0 ... n - 1 takes state 0 to state n: step i computes state i + 1 from state i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["device", "host", "disk"]
"""Where a snapshot is held."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Computes state `stop` from state `start`, and keeps nothing between."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"advance {self.start}-{self.stop}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Stores the state at hand."""

    state: int
    place: Place = "device"

    def __str__(self) -> str:
        return f"snapshot {self.state}" + _where(self.place)


@dataclass(frozen=True, slots=True)
class Restore:
    """Takes a stored state at hand; it stays stored."""

    state: int
    place: Place = "device"

    def __str__(self) -> str:
        return f"restore {self.state}" + _where(self.place)


@dataclass(frozen=True, slots=True)
class Free:
    """Drops a stored state."""

    state: int
    place: Place = "device"

    def __str__(self) -> str:
        return f"free {self.state}" + _where(self.place)


@dataclass(frozen=True, slots=True)
class Record:
    """Runs a step forward and keeps its residuals, with the state that it computes, for its backward."""

    step: int

    def __str__(self) -> str:
        return f"record {self.step}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Runs a step's backward from its record; without one, runs the step forward first, from the state at hand."""

    step: int

    def __str__(self) -> str:
        return f"backward {self.step}"


Action = Advance | Snapshot | Restore | Free | Record | Backward


def _where(place: Place) -> str:
    return "" if place == "device" else f" on {place}"
