"""Revolve: the fewest forward steps that reverse a chain of equal steps with a number of snapshots."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .actions import Action, Advance, Backward, Free, Restore, Snapshot
from .checkpoint_schedule import Schedule, check_count


def revolve(steps: int, snapshots: int) -> Schedule:
    """The schedule with the fewest forward steps, and among those with the fewest snapshots written.

    With beta(c, r) = C(c + r, c) and r the integer for which beta(c, r - 1) < l <= beta(c, r), l steps and c snapshots
    take r l - beta(c + 1, r - 1) forward steps, beside the run forward that each step's backward starts with. No step
    runs more than r + 1 times. The input of the chain occupies one snapshot.

    Args:
        steps: of the chain.
        snapshots: states that can be held at once; more than ``steps - 1`` are of no use.

    Raises:
        ShardingError: steps or snapshots below 1.

    Example:
        >>> from sharding import remat
        >>> remat.revolve(1000, snapshots=20).forwards
        2747

    References:
        Griewank and Walther, Algorithm 799: revolve, ACM TOMS 26(1), 2000.
    """
    check_count("remat.revolve(steps)", steps)
    check_count("remat.revolve(snapshots)", snapshots)
    return Schedule(name="revolve", steps=steps, actions=tuple(reversal(0, steps, snapshots)))


def num_forwards(steps: int, snapshots: int) -> int:
    """The `forwards` of `revolve`, in closed form."""
    repeats = _repeats(steps, snapshots)
    return repeats * steps - _beta(snapshots + 1, repeats - 1)


def reversal(start: int, stop: int, snapshots: int) -> Iterator[Action]:
    """The actions for a part of a chain, with its first state at hand.

    Reverses the steps after the newest snapshot, then those before it, from the snapshot below.
    """
    yield Snapshot(start)
    starts, end = [start], stop
    while starts:
        at = starts[-1]
        while end - at > 1:
            by = first_advance(end - at, snapshots - len(starts) + 1)
            yield Advance(at, at + by)
            at += by
            if end - at > 1:
                yield Snapshot(at)
                starts.append(at)
        yield Backward(at)
        end = at
        while starts and starts[-1] >= end:
            yield Free(starts.pop())
        if starts:
            yield Restore(starts[-1])


def first_advance(steps: int, snapshots: int) -> int:
    """The steps from the stored state to the next snapshot, by the three cases of Algorithm 799."""
    if snapshots == 1:
        return steps - 1
    r = _repeats(steps, snapshots)
    left, right = _beta(snapshots, r - 1), _beta(snapshots - 1, r - 1)
    if steps <= left + _beta(snapshots - 2, r - 1):
        return max(_beta(snapshots, r - 2), 1)
    if steps >= _beta(snapshots, r) - _beta(snapshots - 3, r):
        return left
    return steps - right - _beta(snapshots - 2, r - 1)


def _repeats(steps: int, snapshots: int) -> int:
    """The least r with steps <= beta(snapshots, r): how often a step runs forward before its backward."""
    r, reach = 0, 1
    while reach < steps:
        r += 1
        reach = reach * (snapshots + r) // r
    return r


def _beta(snapshots: int, repeats: int) -> int:
    """The longest chain that these snapshots reverse with no step run forward more than `repeats` times."""
    return math.comb(snapshots + repeats, snapshots) if snapshots >= 0 and repeats >= 0 else 0
