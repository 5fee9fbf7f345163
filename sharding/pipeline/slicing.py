"""Where to cut a sequence into slices that follow each other through a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import ShardingError
from .table import at_least_one


class TokenSlices(NamedTuple):
    """Lengths of slices, first to last, and what a step with them takes."""

    lengths: tuple[int, ...]
    makespan: float


def token_slices(
    *, tokens: int, stages: int, duration: Callable[[int, int], float], unit: int = 1, tolerance: float = 0.0
) -> TokenSlices:
    """The slices for which sum(t) + (stages - 1) max(t) is least, t being the times of slices on one stage.

    For every time that may be the longest one, a dynamic program over the tokens finds the least sum of slices that are
    not longer. Takes O((tokens / unit)^2) steps for each such time, of which there are as many.

    Args:
        tokens: of a sequence, a multiple of ``unit``.
        stages: of the pipeline.
        duration: of a slice forward and backward on one stage, given its length and the tokens before it.
        unit: lengths are multiples of it.
        tolerance: the result may take up to (stages - 1) tolerance longer; fewer longest times are tried.

    References:
        Li et al., TeraPipe, ICML 2021 (2102.07988), section 3.3.
    """
    at_least_one("pipeline.token_slices", tokens=tokens, stages=stages, unit=unit)
    if tokens % unit:
        raise ShardingError(
            "pipeline.token_slices(tokens)", there=f"{tokens} % {unit} = {tokens % unit}", must="a multiple of unit"
        )
    units = tokens // unit
    times = [[duration(k * unit, (end - k) * unit) for k in range(1, end + 1)] for end in range(1, units + 1)]
    best = TokenSlices((), math.inf)
    tried = -math.inf
    for longest in sorted({time for row in times for time in row}):
        if stages * longest >= best.makespan:  # the sum has the longest one too
            break
        if longest < tried + tolerance:
            continue
        tried = longest
        lengths, total = _least_sum(times, longest)
        if lengths and total + (stages - 1) * longest < best.makespan:
            best = TokenSlices(tuple(unit * length for length in lengths), total + (stages - 1) * longest)
    return best


def _least_sum(times: Sequence[Sequence[float]], longest: float) -> tuple[list[int], float]:
    """Lengths whose times add up to the least, none over ``longest``, and the sum; no lengths where there are none.

    Args:
        times: of the slice that ends after ``end`` units and is ``k`` long, at [end - 1][k - 1].
        longest: the most that one may take.
    """
    least = [0.0] + [math.inf] * len(times)
    length = [0] * (len(times) + 1)
    for end, row in enumerate(times, 1):
        for k, time in enumerate(row, 1):
            if time <= longest and least[end - k] + time < least[end]:
                least[end], length[end] = least[end - k] + time, k
    lengths: list[int] = []
    end = len(times) if math.isfinite(least[-1]) else 0
    while end:
        lengths.append(length[end])
        end -= length[end]
    return lengths[::-1], least[-1]
