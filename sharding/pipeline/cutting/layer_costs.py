"""Per-layer costs: validation, and sums over ranges of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from ...errors import ShardingError, raise_together


def check_layers(asked: str, **lists: Sequence[float]) -> int:
    """The number of layers; each list must have one non-negative number per layer.

    Raises:
        ShardingError: no layers, lists of unequal lengths, negative or non-finite numbers.
    """
    first, *_ = lengths = {name: len(values) for name, values in lists.items()}
    if not lengths[first]:
        raise ShardingError(f"{asked}({first})", found="no layers", required="at least one layer")
    if len(set(lengths.values())) > 1:
        raise ShardingError(
            asked,
            found=[f"{name} has {length} numbers" for name, length in lengths.items()],
            required="one number per layer in each list, in model order",
        )
    bad = [
        ShardingError(f"{asked}({name}[{layer}])", found=f"{value!r}", required="a finite non-negative number")
        for name, values in lists.items()
        for layer, value in enumerate(values)
        if not (isinstance(value, Real) and math.isfinite(value) and value >= 0)
    ]
    raise_together(asked, bad)
    return lengths[first]


def check_bandwidths(asked: str, **bandwidths: float) -> None:
    """Raises unless all bandwidths are positive; an infinite one means transfers in no time."""
    bad = [
        ShardingError(f"{asked}({name})", found=f"{value!r}", required="a positive number, in bytes per unit of time")
        for name, value in bandwidths.items()
        if not (isinstance(value, Real) and value > 0)
    ]
    raise_together(asked, bad)


def run_sums(values: Sequence[float]) -> list[list[float]]:
    """Sums of layers ``begin`` to ``end - 1`` at [begin][end - begin]; equal runs have exactly equal sums."""
    count = len(values)
    return [[math.fsum(values[begin:end]) for end in range(begin, count + 1)] for begin in range(count + 1)]
