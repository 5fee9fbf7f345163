"""Rotor: the cheapest persistent schedule of a chain of unequal steps within a number of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..display.units import bytes_text
from ..errors import ShardingError
from .blocks import Block, actions
from .chain import Chain
from .checkpoint_schedule import Schedule

MOST_POINTS = 1_000
"""Trade-offs between bytes and cost that are kept per part of the chain."""


class Front(NamedTuple):
    """The trade-offs of a part of the chain: more bytes, less cost."""

    bytes: np.ndarray
    """Ascending."""
    cost: np.ndarray
    """Descending."""
    stop: np.ndarray
    """The end of the block that runs again, which starts with the part; 0 where its first step is recorded."""

    def at(self, num_bytes: np.ndarray) -> np.ndarray:
        """The least cost with these bytes; infinite where they are too few."""
        place = np.searchsorted(self.bytes, num_bytes, side="right")
        return np.concatenate([[np.inf], self.cost])[place]


def rotor(
    forward_costs: Sequence[float],
    backward_costs: Sequence[float],
    state_bytes: Sequence[int],
    memory_bytes: float,
    *,
    record_bytes: Sequence[int] = (),
) -> Schedule:
    """The cheapest schedule that stays within a number of bytes, of all that keep a stored state until it is used.

    The part [s, t), with state s held outside, takes within m bytes, of which the gradient of state t is one part,

        cost(s, t, m) = min( f_s + b_s + cost(s + 1, t, m - record_s)                               step s is recorded
                             min over k: f_s + ... + f_(k - 1) + cost(k, t, m - x_k) + cost(s, k, m) )    [s, k) reruns

    Whole fronts of (bytes, cost) are computed in place of one m, so that nothing is rounded. Of a front with over 1,000
    points, 1,000 are kept: then a cheaper schedule may exist. Takes O(n^3) merges of fronts: a second for 50 steps.

    Args:
        forward_costs: of each step, in any unit.
        backward_costs: of each step.
        state_bytes: of the input and of each step's output.
        memory_bytes: limit of states, records and gradients; see `Schedule.peak_bytes`.
        record_bytes: see `Chain`.

    Raises:
        ShardingError: a limit that no schedule meets, with the least that one does; invalid costs or sizes.

    Example:
        >>> from sharding import remat
        >>> s = remat.rotor([1, 1, 9, 1], [2, 2, 18, 2], [4, 8, 2, 8, 1], memory_bytes=24)
        >>> s.forwards, s.cost, s.peak_bytes
        (6, 38.0, 24)

    References:
        Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, Optimal checkpointing for heterogeneous chains: how to
        train deep neural networks with limited memory, 2019 (1911.13214), theorem 1. There, bytes are rounded to slots.
    """
    chain = Chain(
        state_bytes=tuple(state_bytes),
        record_bytes=tuple(record_bytes),
        forward_costs=tuple(forward_costs),
        backward_costs=tuple(backward_costs),
    )
    limit = memory_bytes - chain.state_bytes[0]
    solver = _Solver(chain, limit)
    fronts = solver.fronts()
    if not len(fronts[0, chain.steps].bytes):
        raise _too_few(chain, memory_bytes)
    whole = _blocks(chain, fronts, limit)
    return Schedule(name="rotor", steps=chain.steps, actions=tuple(actions(whole)), chain=chain)


class _Solver:
    """The dynamic program, for parts of growing length."""

    def __init__(self, chain: Chain, limit: float):
        self.states = np.asarray(chain.state_bytes, float)
        self.records = np.asarray(chain.record_bytes, float)
        self.backward = np.asarray(chain.backward_costs, float)
        self.forward = np.asarray(chain.forward_costs, float)
        self.before = np.concatenate([[0.0], np.cumsum(self.forward)])
        self.limit = limit

    def fronts(self) -> dict[tuple[int, int], Front]:
        """The front of each part [start, stop)."""
        steps = len(self.records)
        found: dict[tuple[int, int], Front] = {}
        for length in range(1, steps + 1):
            for start in range(steps - length + 1):
                options = list(self.options(found, start, start + length))
                taken, costs, stops = (np.concatenate(one) for one in zip(*options, strict=True))
                found[start, start + length] = _best(taken, costs, stops, self.limit)
        return found

    def options(self, found: dict[tuple[int, int], Front], start: int, stop: int) -> Iterator[tuple[np.ndarray, ...]]:
        """(bytes, costs, stops) of the first step recorded, then of each block that may run again."""
        x, record, gradient = self.states, self.records[start], self.states[stop]
        own = max(record + gradient, record + x[start + 1] + x[start])
        cost = self.forward[start] + self.backward[start]
        after = found[start + 1, stop] if start + 1 < stop else None
        taken = np.asarray([own]) if after is None else np.maximum(after.bytes + record, own)
        yield taken, np.asarray([cost]) if after is None else after.cost + cost, np.zeros(len(taken), int)
        moving = gradient + x[start + 1]
        for k in range(start + 1, stop):
            moving = max(moving, gradient + x[k] + (x[k - 1] if k - 1 > start else 0.0))
            left, right = found[start, k], found[k, stop]
            taken = np.maximum(np.concatenate([left.bytes, right.bytes + x[k]]), moving)
            costs = left.at(taken) + right.at(taken - x[k]) + (self.before[k] - self.before[start])
            yield taken, costs, np.full(len(taken), k)


def _best(taken: np.ndarray, costs: np.ndarray, stops: np.ndarray, limit: float) -> Front:
    """The points that no other point beats in both bytes and cost."""
    fits = (taken <= limit) & np.isfinite(costs)
    taken, costs, stops = taken[fits], costs[fits], stops[fits]
    order = np.lexsort((costs, taken))
    taken, costs, stops = taken[order], costs[order], stops[order]
    least = np.minimum.accumulate(costs)
    better = np.concatenate([[True], costs[1:] < least[:-1]])[: len(costs)]
    (kept,) = np.nonzero(better)
    if len(kept) > MOST_POINTS:
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, MOST_POINTS).astype(int))]
    return Front(taken[kept], costs[kept], stops[kept])


def _blocks(chain: Chain, fronts: dict[tuple[int, int], Front], limit: float) -> Block:
    """The blocks of the cheapest schedule within the limit."""
    whole = Block(0, chain.steps, [])
    waiting = [(whole, limit)]
    while waiting:
        block, left = waiting.pop()
        start, within = block.start, left
        while start < block.stop:
            front = fronts[start, block.stop]
            stop = int(front.stop[np.searchsorted(front.bytes, within, side="right") - 1])
            if stop:
                inner = Block(start, stop, [])
                block.parts.append(inner)
                waiting.append((inner, within))
                start, within = stop, within - chain.state_bytes[stop]
            else:
                block.parts.append(start)
                start, within = start + 1, within - chain.record_bytes[start]
    return whole


def _too_few(chain: Chain, memory_bytes: float) -> ShardingError:
    least = int(_Solver(chain, np.inf).fronts()[0, chain.steps].bytes[0]) + chain.state_bytes[0]
    return ShardingError(
        "remat.rotor(memory_bytes)",
        found=f"{memory_bytes:,g} bytes for {chain.steps} steps",
        required=f"at least {least:,} bytes ({bytes_text(least)}): the least that any schedule takes",
        fix=f"memory_bytes={least}",
    )
