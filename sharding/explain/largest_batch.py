"""The largest batch whose peak memory fits a chip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..display.units import bytes_text
from ..errors import ShardingError
from .memory_fit import Fit, with_memory
from .memory_report import MemoryReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch that fits a chip."""

    batch: int
    """0 if even the smallest does not fit."""
    fit: Fit | None
    """The program's memory at that batch; None if none fits."""
    next: Fit
    """The memory at the next larger batch, which does not fit, or at `limit`."""
    hint: str
    """The mesh axis to enlarge for a larger batch, and the bytes that doubling it saves."""

    def __str__(self) -> str:
        first = f"batch {self.batch} {self.fit}" if self.fit is not None else "no batch fits"
        return f"{first}; the next batch {self.next}\n{self.hint}"


def largest_batch(
    memory: Callable[[int], MemoryReport], chip: str, *, multiple: int = 1, limit: int = 2**20
) -> LargestBatch:
    """Finds the largest batch whose program fits a chip, by doubling and bisection.

    Args:
        memory: maps a number of rows to the memory report of the program, for instance
            `lambda rows: step.complete(state, jax.ShapeDtypeStruct((rows, 1024), "int32")).memory()`.
        chip: a chip of `sharding.hardware`, such as `"h100"`.
        multiple: batches are multiples of it: the size of the axes that the rows are sharded over.
        limit: the largest batch to try.

    Raises:
        ShardingError: an unknown chip, or one without memory of its own; a multiple below 1 or above the limit.

    Nothing compiles: each trial costs one completion. Assumes that memory grows with the batch.
    """
    if not 1 <= multiple <= limit:
        raise ShardingError(
            f"largest_batch(multiple={multiple}, limit={limit})", required="1 <= multiple <= limit", fix="multiple=1"
        )
    with_memory(chip)
    found: dict[int, MemoryReport] = {}

    def fits(units: int) -> bool:
        found[units] = memory(units * multiple)
        return bool(found[units].fits(chip))

    most, good, bad = limit // multiple, 0, 1
    while bad < most and fits(bad):
        good, bad = bad, min(2 * bad, most)
    if bad == most and fits(most):
        good = most
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    after = found[bad] if bad in found else memory(bad * multiple)
    return LargestBatch(
        batch=good * multiple,
        fit=found[good].fits(chip) if good else None,
        next=after.fits(chip),
        hint=larger_axis_hint(after),
    )


def larger_axis_hint(report: MemoryReport) -> str:
    """Which mesh axis saves most memory when it is doubled."""
    shares = sorted(report.by_axis.values(), key=lambda s: (-s.twice_as_long_saves, s.axis))
    if not shares or not shares[0].twice_as_long_saves:
        return "nothing is sharded over any mesh axis: more devices would not help with these shardings"
    best = shares[0]
    return f"doubling axis {best.axis!r} would save {bytes_text(best.twice_as_long_saves)} per device"
