"""The layers of a model as lists of numbers, one per layer, and what a run of them costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from ...errors import ShardingError, raise_together


def check_layers(asked: str, **lists: Sequence[float]) -> int:
    """The number of layers, where each list has one number of at least 0 for each of them.

    Raises:
        ShardingError: no layers, lists that are not equally long, and numbers that are negative or not finite.
    """
    first, *_ = lengths = {name: len(values) for name, values in lists.items()}
    if not lengths[first]:
        raise ShardingError(f"{asked}({first})", there="no layers", must="at least one layer")
    if len(set(lengths.values())) > 1:
        raise ShardingError(
            asked,
            there=[f"{name} has {length} numbers" for name, length in lengths.items()],
            must="one number per layer in each list, in the order of the model",
        )
    bad = [
        ShardingError(f"{asked}({name}[{layer}])", there=f"{value!r}", must="finite numbers of at least 0")
        for name, values in lists.items()
        for layer, value in enumerate(values)
        if not (isinstance(value, Real) and math.isfinite(value) and value >= 0)
    ]
    raise_together(asked, bad)
    return lengths[first]


def check_bandwidths(asked: str, **bandwidths: float) -> None:
    """Returns None where all are above 0; infinite ones are links that take no time."""
    bad = [
        ShardingError(f"{asked}({name})", there=f"{value!r}", must="a number above 0, in bytes per unit of time")
        for name, value in bandwidths.items()
        if not (isinstance(value, Real) and value > 0)
    ]
    raise_together(asked, bad)


def run_sums(values: Sequence[float]) -> list[list[float]]:
    """The sum of layers ``begin`` to ``end - 1``, at [begin][end - begin]; the same for the same numbers anywhere."""
    count = len(values)
    return [[math.fsum(values[begin:end]) for end in range(begin, count + 1)] for begin in range(count + 1)]
