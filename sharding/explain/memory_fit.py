"""Whether a program's peak memory fits a chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .. import hardware
from ..display.units import bytes_text
from ..errors import ShardingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A program's peak memory and a chip's memory, in bytes per device; truthy if it fits."""

    chip: str
    peak_bytes: int
    memory_bytes: int
    usable_bytes: int
    """What programs may use of it: NCCL keeps its buffers in what is left."""
    range_bytes: tuple[int, int]
    """Where the compiled peak lies for nine of ten programs."""
    outside_bytes: int = 0
    """NCCL's buffers."""

    @property
    def spare_bytes(self) -> int:
        """Usable memory left over; negative if it does not fit."""
        return self.usable_bytes - self.peak_bytes

    @property
    def certainty(self) -> Literal["yes", "no", "unsure"]:
        """Whether it fits at both ends of the range, at neither, or only at one."""
        low, high = (num_bytes <= self.usable_bytes for num_bytes in self.range_bytes)
        return ("yes" if low else "no") if low == high else "unsure"

    def __bool__(self) -> bool:
        return self.spare_bytes >= 0

    def __str__(self) -> str:
        share = self.peak_bytes / self.usable_bytes
        verb = "fits" if self else "does not fit"
        used, usable, all_of_it = map(bytes_text, (self.peak_bytes, self.usable_bytes, self.memory_bytes))
        found = f"{verb} {self.chip}: {used} of {usable} usable per device ({share:.1%}; {all_of_it} in all)"
        if self.outside_bytes:
            found += f", beside {bytes_text(self.outside_bytes)} for NCCL"
        if self.certainty == "unsure":
            low, high = map(bytes_text, self.range_bytes)
            found += f"; unsure: {low} to {high} in nine of ten programs"
        return found


def fit(
    peak_bytes: int,
    chip: str,
    *,
    usable: float | None = None,
    range_bytes: tuple[int, int] | None = None,
    outside_bytes: int = 0,
) -> Fit:
    """Whether `peak_bytes` per device fit a chip.

    Args:
        peak_bytes: of a program.
        chip: its name.
        usable: the share of the memory that programs may use, as `XLA_CLIENT_MEM_FRACTION` sets it on GPUs. Default:
            the chip's.
        range_bytes: where the compiled peak lies; default: as predicted.
        outside_bytes: what others keep in the chip's memory.

    Raises:
        ShardingError: an unknown chip, one that uses the host's memory, or a share that is none.
    """
    known = with_memory(chip)
    num_bytes = known.memory_bytes or 0
    if usable is not None and not 0 < usable <= 1:
        raise ShardingError(
            "the usable share of the memory",
            found=f"{usable}",
            required="a number above 0 and at most 1",
            fix=f'fits("{chip}", usable=0.95)',
        )
    default = num_bytes if known.usable_memory_bytes is None else known.usable_memory_bytes
    share = default if usable is None else int(usable * num_bytes)
    return Fit(
        chip=chip,
        peak_bytes=peak_bytes,
        memory_bytes=num_bytes,
        usable_bytes=max(1, min(share, num_bytes - outside_bytes)),
        range_bytes=range_bytes or (peak_bytes, peak_bytes),
        outside_bytes=outside_bytes,
    )


def with_memory(name: str) -> hardware.Chip:
    """A chip that has memory of its own.

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
    return known
