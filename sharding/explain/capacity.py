"""Whether a program fits a chip."""

from __future__ import annotations

from dataclasses import dataclass

from .. import hardware
from ..errors import ShardingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A program's memory beside a chip's, in bytes per device; true if it fits."""

    chip: str
    peak_bytes: int
    memory_bytes: int

    @property
    def spare_bytes(self) -> int:
        """What is left; negative where it does not fit."""
        return self.memory_bytes - self.peak_bytes

    def __bool__(self) -> bool:
        return self.spare_bytes >= 0

    def __str__(self) -> str:
        share = self.peak_bytes / self.memory_bytes
        verb = "fits" if self else "does not fit"
        return f"{verb} {self.chip}: {self.peak_bytes:,} of {self.memory_bytes:,} bytes per device ({share:.1%})"


def fit(peak_bytes: int, chip: str) -> Fit:
    """Whether so many bytes per device fit a chip.

    Raises:
        ShardingError: an unknown chip, or one whose memory is the host's own.
    """
    return Fit(chip=chip, peak_bytes=peak_bytes, memory_bytes=memory_bytes(chip))


def memory_bytes(name: str) -> int:
    """The memory of one device of a chip, in bytes.

    Raises:
        ShardingError: an unknown chip, or one whose memory is the host's own.
    """
    known = hardware.chip(name)
    if known.memory_bytes is None:
        raise ShardingError(
            f"the memory of {name!r}",
            there="its memory is the host's own",
            must="the chip is one with memory of its own",
            fix='fits("h100"), or compare .peak_bytes with what the host has',
        )
    return known.memory_bytes
