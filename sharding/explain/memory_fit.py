"""Whether a program's peak memory fits a chip."""

from __future__ import annotations

from dataclasses import dataclass

from .. import hardware
from ..errors import ShardingError
from .units import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A program's peak memory and a chip's memory, in bytes per device; truthy if it fits."""

    chip: str
    peak_bytes: int
    memory_bytes: int

    @property
    def spare_bytes(self) -> int:
        """Memory left over; negative if it does not fit."""
        return self.memory_bytes - self.peak_bytes

    def __bool__(self) -> bool:
        return self.spare_bytes >= 0

    def __str__(self) -> str:
        share = self.peak_bytes / self.memory_bytes
        verb = "fits" if self else "does not fit"
        used, available = bytes_text(self.peak_bytes), bytes_text(self.memory_bytes)
        return f"{verb} {self.chip}: {used} of {available} per device ({share:.1%})"


def fit(peak_bytes: int, chip: str) -> Fit:
    """Whether `peak_bytes` per device fit a chip.

    Raises:
        ShardingError: an unknown chip, or one that uses the host's memory.
    """
    return Fit(chip=chip, peak_bytes=peak_bytes, memory_bytes=memory_bytes(chip))


def memory_bytes(name: str) -> int:
    """The memory of one device of a chip, in bytes.

    Raises:
        ShardingError: an unknown chip, or one that uses the host's memory.
    """
    known = hardware.chip(name)
    if known.memory_bytes is None:
        raise ShardingError(
            f"the memory of {name!r}",
            found="it uses the host's memory",
            required="a chip with memory of its own",
            fix='fits("h100"), or compare .peak_bytes with the host\'s memory',
        )
    return known.memory_bytes
