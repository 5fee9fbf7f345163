"""What one call of a completed program costs each device: time, bytes sent, memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from ..cost import Topology
from ..display.units import bytes_text, seconds_text
from ..graph.garbage_collection import no_collection
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
        peak_bytes, argument_bytes = self._held
        seconds, wire_bytes, sent_bytes = self._estimated
        return Costs(
            seconds=seconds,
            sent_bytes=communication(self.assignment).total_bytes if sent_bytes is None else sent_bytes,
            wire_bytes=wire_bytes,
            peak_bytes=peak_bytes,
            argument_bytes=argument_bytes,
            lost_bytes=lost_bytes(self.assignment),
        )

    def __str__(self) -> str:
        return str(self.all())

    @property
    def seconds(self) -> float:
        """As in `Costs`."""
        return self._estimated[0]

    @property
    def wire_bytes(self) -> int:
        """As in `Costs`."""
        return self._estimated[1]

    @property
    def peak_bytes(self) -> int:
        """As in `Costs`."""
        return self._held[0]

    @cached_property
    def _held(self) -> tuple[int, int]:
        """Peak and arguments in bytes; what they are predicted from is large, and not kept."""
        held = usage(self.assignment, self.donated, platform=self.platform) if self.report is None else self.report
        return held.peak_bytes, held.argument_bytes

    @cached_property
    def _estimated(self) -> tuple[float, int, int | None]:
        """Seconds, bytes on the wire, and those of the collectives as the program asks for them, if they are known."""
        backend = self.platform if self.on is None else self.on.chip
        platform = self.platform if self.on is None else self.on.chip.platform
        with no_collection():
            known = ProgramCollectives(self.assignment, platform=platform)
            ledger = communication(self.assignment, known=known, platform=platform)
            seconds = 0.0 if self.on is None else estimate(self.assignment, self.on, known=known).seconds
            sent_bytes = ledger.total_bytes if platform == "cpu" else None
            return seconds, ledger.lowered(backend).total_wire_bytes, sent_bytes


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
