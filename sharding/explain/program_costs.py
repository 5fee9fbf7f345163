"""What one call of a completed program costs each device: time, bytes sent, memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from ..cost import Topology
from ..display.units import bytes_text, seconds_text
from ..graph.garbage_collection import no_collection
from ..hardware import Platform
from ..memory import Usage, usage
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


class ProgramCosts:
    """The costs of a completed program, each of which is found when it is asked for.

    Args:
        assignment: the completed program.
        on: the mesh with its devices; None if they are unknown.
        donated: indices of the donated inputs of the graph.
        platform: whose compiler is modelled.
        report: its memory, if it is known.
    """

    def __init__(
        self,
        assignment: Assignment,
        on: Topology | None,
        *,
        donated: Collection[int],
        platform: Platform,
        report: MemoryReport | None = None,
    ):
        self.assignment, self.on, self.donated = assignment, on, donated
        self.platform: Platform = platform
        self.report = report

    def all(self) -> Costs:
        """All of them."""
        return Costs(
            seconds=self.seconds,
            sent_bytes=communication(self.assignment, known=self._collectives).total_bytes,
            wire_bytes=self.wire_bytes,
            peak_bytes=self.peak_bytes,
            argument_bytes=self._memory.argument_bytes,
            lost_bytes=lost_bytes(self.assignment),
        )

    def __str__(self) -> str:
        return str(self.all())

    @cached_property
    def seconds(self) -> float:
        """As in `Costs`."""
        with no_collection():
            return 0.0 if self.on is None else estimate(self.assignment, self.on, known=self._collectives).seconds

    @cached_property
    def wire_bytes(self) -> int:
        """As in `Costs`."""
        with no_collection():
            known = self._collectives
            ledger = communication(self.assignment, known=known, platform=known.platform)
            return ledger.lowered(self.platform if self.on is None else self.on.chip).total_wire_bytes

    @property
    def peak_bytes(self) -> int:
        """As in `Costs`."""
        return self._memory.peak_bytes

    @cached_property
    def _memory(self) -> MemoryReport | Usage:
        return usage(self.assignment, self.donated, platform=self.platform) if self.report is None else self.report

    @cached_property
    def _collectives(self) -> ProgramCollectives:
        return ProgramCollectives(self.assignment, platform=self.platform if self.on is None else self.on.chip.platform)


def costs(
    assignment: Assignment,
    on: Topology | None,
    *,
    donated: Collection[int],
    platform: Platform,
    report: MemoryReport | None = None,
) -> Costs:
    """The costs of a completed program; the arguments are those of `ProgramCosts`."""
    return ProgramCosts(assignment, on, donated=donated, platform=platform, report=report).all()


def lost_bytes(assignment: Assignment) -> int:
    """What conflicts cost beyond what the annotations ask for."""
    return sum(c.bytes_lost for c in assignment.conflicts)
