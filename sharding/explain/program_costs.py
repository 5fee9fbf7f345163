"""What one call of a completed program costs each device: time, bytes sent, memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from ..cost import Topology
from ..display.units import bytes_text, seconds_text
from ..hardware import Platform
from ..memory import usage
from ..propagation import Assignment
from .predicted_collectives import ProgramCollectives, communication
from .step_time import estimate


class Memory(Protocol):
    """Memory of a program: its report, its usage, or the costs of one that holds as much."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def argument_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one call of a completed program costs each device."""

    seconds: float
    """Estimated time; 0 if the devices are unknown."""
    sent_bytes: int
    """Bytes of all collectives."""
    peak_bytes: int
    """Peak memory."""
    argument_bytes: int
    """Of that, the arguments, such as parameters and optimizer state."""
    lost_bytes: int
    """What conflicts cost beyond what the annotations ask for."""
    wire_bytes: int = 0
    """Bytes that each device sends, by the collectives that the platform's compiler makes of these."""

    def __str__(self) -> str:
        time = f"{seconds_text(self.seconds)} per step, " if self.seconds else ""
        return f"{time}sends {bytes_text(self.sent_bytes)}, peak memory {bytes_text(self.peak_bytes)}"


def costs(
    assignment: Assignment,
    on: Topology | None,
    *,
    donated: Collection[int],
    platform: Platform,
    held: Memory | None = None,
) -> Costs:
    """The costs of a completed program.

    Args:
        assignment: the completed program.
        on: the mesh with its devices; None if they are unknown.
        donated: indices of the donated inputs of the graph.
        platform: whose compiler is modelled.
        held: its memory, if it is known.
    """
    used = usage(assignment, donated, platform=platform) if held is None else held
    known = ProgramCollectives(assignment, platform=platform if on is None else on.chip.platform)
    collectives = communication(assignment, known=known)
    return Costs(
        seconds=0.0 if on is None else estimate(assignment, on, known=known).seconds,
        sent_bytes=collectives.total_bytes,
        wire_bytes=collectives.lowered(platform if on is None else on.chip).total_wire_bytes,
        peak_bytes=used.peak_bytes,
        argument_bytes=used.argument_bytes,
        lost_bytes=lost_bytes(assignment),
    )


def lost_bytes(assignment: Assignment) -> int:
    """What conflicts cost beyond what the annotations ask for."""
    return sum(c.bytes_lost for c in assignment.conflicts)
