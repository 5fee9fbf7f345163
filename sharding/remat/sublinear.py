"""Segments that run again: the square root of the steps, and the budgeted walk over layers of unequal sizes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from .blocks import actions, segments
from .chain import Chain
from .checkpoint_schedule import Schedule, check_count


def sqrt(steps: int) -> Schedule:
    """Segments of about the square root of the steps: about 2 sqrt(n) states and records at once, one more forward.

    The state before each segment is stored; a segment runs again, keeping its residuals, before its backward. The last
    one keeps them at once: 2 n - (steps of the last segment) forward steps. Segments are equal but for the first.

    Raises:
        ShardingError: steps below 1.

    Example:
        >>> from sharding import remat
        >>> s = remat.sqrt(64)
        >>> s.forwards, s.snapshots
        (120, 16)

    References:
        Chen, Xu, Zhang and Guestrin, Training deep nets with sublinear memory cost, 2016 (1604.06174), section 4.
    """
    check_count("remat.sqrt(steps)", steps)
    length = math.isqrt(steps - 1) + 1
    starts = [0, *range(steps % length or length, steps, length)]
    return Schedule(name="sqrt", steps=steps, actions=tuple(actions(segments(starts, steps))))


def chen(layer_bytes: Sequence[int], budget_bytes: int | None = None) -> Schedule:
    """The budgeted walk: the layer whose output takes its segment above the budget ends the segment.

    Outputs of segments' last layers are stored; the others are computed again. The last segment is recorded at once.

    Args:
        layer_bytes: of each layer's output.
        budget_bytes: of a segment. By default the one for which stored outputs and the largest segment take least
            together, of all between B / sqrt(2) and sqrt(2) B, where B^2 = (sum of sizes) x (largest size).

    Raises:
        ShardingError: no layers; sizes that are negative or fractions; a budget below 0.

    Example:
        >>> from sharding import remat
        >>> s = remat.chen([4, 1, 1, 4, 1, 1])
        >>> s.forwards, s.snapshots, s.peak_bytes
        (9, 5, 11)

    References:
        Chen, Xu, Zhang and Guestrin, Training deep nets with sublinear memory cost, 2016 (1604.06174), algorithm 3.
    """
    chain = Chain(state_bytes=(0, *layer_bytes))
    if budget_bytes is not None:
        check_count("remat.chen(budget_bytes)", budget_bytes, least=0)
    ends = list(accumulate(layer_bytes, initial=0))
    starts = _starts(ends, _best_budget(ends, layer_bytes) if budget_bytes is None else budget_bytes)
    return Schedule(name="chen", steps=chain.steps, actions=tuple(actions(segments(starts, chain.steps))), chain=chain)


def _starts(ends: Sequence[int], budget: int) -> list[int]:
    """The first layer of each segment, given the sums of sizes before each layer."""
    starts = [0]
    while (last := bisect_right(ends, ends[starts[-1]] + budget) - 1) < len(ends) - 2:
        starts.append(last + 1)
    return starts


def _best_budget(ends: Sequence[int], layer_bytes: Sequence[int]) -> int:
    """The budget with the least bytes; between two that give other segments, nothing changes."""
    square = ends[-1] * max(layer_bytes)
    budget, found = math.isqrt(square // 2), []
    while budget <= math.isqrt(2 * square):
        starts = _starts(ends, budget)
        bounds = [*starts, len(layer_bytes)]
        taken = [ends[b] - ends[a] for a, b in pairwise(bounds)]
        stored = sum(layer_bytes[start - 1] for start in starts[1:])
        found.append((stored + max(taken), budget))
        above = [own for own in taken if own > budget]
        if not above:
            break
        budget = min(above)
    return min(found)[1]
