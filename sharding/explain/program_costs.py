"""What one call of a completed program costs each device: time, bytes sent, memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..cost import Topology
from ..display.units import bytes_text, seconds_text
from ..hardware import Platform
from ..memory import usage
from ..propagation import Assignment
from .memory_report import MemoryReport
from .predicted_collectives import ProgramCollectives, communication
from .step_time import estimate


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
    report: MemoryReport | None = None,
) -> Costs:
    """The costs of a completed program.

    Args:
        assignment: the completed program.
        on: the mesh with its devices; None if they are unknown.
        donated: indices of the donated inputs of the graph.
        platform: whose compiler is modelled.
        report: its memory, if it is known.
    """
    held = usage(assignment, donated, platform=platform) if report is None else report
    known = ProgramCollectives(assignment, platform=platform if on is None else on.chip.platform)
    collectives = communication(assignment, known=known)
    return Costs(
        seconds=0.0 if on is None else estimate(assignment, on, known=known).seconds,
        sent_bytes=collectives.total_bytes,
        wire_bytes=collectives.lowered(platform if on is None else on.chip).total_wire_bytes,
        peak_bytes=held.peak_bytes,
        argument_bytes=held.argument_bytes,
        lost_bytes=lost_bytes(assignment),
    )


def lost_bytes(assignment: Assignment) -> int:
    """What conflicts cost beyond what the annotations ask for."""
    return sum(c.bytes_lost for c in assignment.conflicts)
