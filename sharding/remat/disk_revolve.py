"""Disk-Revolve: snapshots in memory, and any number of them in a second place that takes time to write and read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from ..errors import ShardingError
from .actions import Action, Advance, Free, Restore, Snapshot
from .checkpoint_schedule import Schedule, check_count
from .revolve import num_forwards, reversal


def disk_revolve(
    steps: int,
    snapshots: int,
    *,
    write_cost: float,
    read_cost: float,
    place: Literal["host", "disk"] = "disk",
) -> Schedule:
    """The cheapest schedule with some snapshots on the device and any number in a second place.

    With R(l) the forward steps of `revolve` and costs in units of one of them, l steps whose input is at hand cost

        D(l) = min( R(l), min over j: write + j + D(l - j) + read + L(j) )
        L(l) = min( R(l), min over j: j + R(l - j) + read + L(j) )            l steps whose input is stored there

    and the schedule is the one of D(steps). Takes O(n^2) time.

    Args:
        steps: of the chain.
        snapshots: on the device at once, the input's included.
        write_cost: of one state to the second place, in forward steps.
        read_cost: of one state from it, likewise.
        place: the second place.

    Raises:
        ShardingError: steps or snapshots below 1; costs that are negative or not finite.

    Example:
        >>> from sharding import remat
        >>> s = remat.disk_revolve(100, 3, write_cost=2, read_cost=2)
        >>> s.forwards, remat.revolve(100, 3).forwards
        (175, 490)

    References:
        Aupy, Herrmann, Hovland and Robert, Optimal multistage algorithm for adjoint computation, SIAM J. Sci. Comput.
        38(3), 2016.
    """
    check_count("remat.disk_revolve(steps)", steps)
    check_count("remat.disk_revolve(snapshots)", snapshots)
    for name, value in (("write_cost", write_cost), ("read_cost", read_cost)):
        if not (math.isfinite(value) and value >= 0):
            required = "a finite number of at least 0, in forward steps"
            raise ShardingError(f"remat.disk_revolve({name})", found=repr(value), required=required)
    plain = np.asarray([0.0, *(num_forwards(length, snapshots) for length in range(1, steps + 1))])
    loaded, load_cuts = _loaded(plain, read_cost)
    cuts = _cuts(plain, loaded, write_cost + read_cost)
    found = tuple(_actions(steps, snapshots, cuts, load_cuts, place))
    return Schedule(name="disk-revolve", steps=steps, actions=found)


def _loaded(plain: np.ndarray, read_cost: float) -> tuple[np.ndarray, list[int]]:
    """L(l) and the j that it takes, 0 for R(l)."""
    least, cuts = plain.copy(), [0, 0]
    for length in range(2, len(plain)):
        j = np.arange(1, length)
        options = j + plain[length - j] + read_cost + least[j]
        best = int(np.argmin(options))
        cuts.append(best + 1 if options[best] < plain[length] else 0)
        least[length] = min(options[best], plain[length])
    return least, cuts


def _cuts(plain: np.ndarray, loaded: np.ndarray, both_costs: float) -> list[int]:
    """The j that D(l) takes, 0 for R(l)."""
    least, cuts = plain.copy(), [0, 0]
    for length in range(2, len(plain)):
        j = np.arange(1, length)
        options = both_costs + j + least[length - j] + loaded[j]
        best = int(np.argmin(options))
        cuts.append(best + 1 if options[best] < plain[length] else 0)
        least[length] = min(options[best], plain[length])
    return cuts


def _actions(
    steps: int, snapshots: int, cuts: list[int], load_cuts: list[int], place: Literal["host", "disk"]
) -> Iterator[Action]:
    """Writes states on the way to the end, reverses what is left from memory, then each part from its stored state."""
    start, stored = 0, []
    while cuts[steps - start]:
        by = cuts[steps - start]
        stored.append((start, start + by))
        yield Snapshot(start, place)
        yield Advance(start, start + by)
        start += by
    yield from reversal(start, steps, snapshots)
    for start, stop in reversed(stored):
        while load_cuts[stop - start]:
            by = load_cuts[stop - start]
            yield Restore(start, place)
            yield Advance(start, start + by)
            yield from reversal(start + by, stop, snapshots)
            stop = start + by
        yield Restore(start, place)
        yield Free(start, place)
        yield from reversal(start, stop, snapshots)
