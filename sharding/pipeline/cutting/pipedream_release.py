"""PipeDream's partitioning as its released optimizer calculates it, which differs from the paper's recursion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...errors import ShardingError
from .layer_costs import check_layers, run_sums
from .pipedream_partition import Level, ReplicatedCut, check_levels

ASKED = "cutting.pipedream_released"


def pipedream_released(
    costs: Sequence[float],
    *,
    activation_bytes: Sequence[float],
    weight_bytes: Sequence[float],
    levels: Sequence[Level | tuple[int, float]],
    activation_compression: float | None = None,
    memory_bytes: float = math.inf,
) -> ReplicatedCut:
    """The plan of PipeDream's released program; use `cutting.pipedream` to plan, this to reproduce.

    Its differences: a stage's time and its synchronisation are added up,

        T(i, j, m) = 1/m (time of i..j-1 on one part + 4 (m - 1) W / (m B)),

    where the synchronisation of a first stage is also divided by the parts of the level below; transfers only count if
    `activation_compression` is given, as 2 a / (B m compression) to and from each stage but the first one, with its m
    parts; and on further levels, a stage's time on one part is that of its best plan there.

    Args:
        costs: forward and backward time of each layer for one minibatch on one worker.
        activation_bytes: activations from each layer to the next for one minibatch.
        weight_bytes: of each layer.
        levels: (parts, bandwidth), lowest first.
        activation_compression: 1 counts transfers in full; None not at all.
        memory_bytes: of a worker, for the versions of weights and activations that a stage stashes; with r of p parts
            left for later stages, that is ceil(r / m) of them beyond the first: none if one stage has all parts.

    Example:
        >>> costs, weights = [8, 8, 8, 1], [1, 1, 1, 99]
        >>> plan = pipedream_released(costs, activation_bytes=[1] * 4, weight_bytes=weights, levels=[(4, 10)])
        >>> plan.sizes, plan.replicas, round(plan.bottleneck, 2)
        ((1, 1, 1, 1), (1, 1, 1, 1), 8.0)

    Raises:
        ShardingError: no layers, lists of unequal lengths, negative or non-finite numbers, no levels, levels without
            parts or bandwidth.

    References:
        msr-fiddle/pipedream, `optimizer/optimizer_graph_hierarchical.py`, for a chain of layers.
    """
    check_layers(ASKED, costs=costs, activation_bytes=activation_bytes, weight_bytes=weight_bytes)
    check_levels(ASKED, levels)
    if activation_compression is not None and not activation_compression > 0:
        raise ShardingError(
            f"{ASKED}(activation_compression={activation_compression})", required="a positive number, or None"
        )
    below = {
        (begin, begin + length): _Plan(time, (length,), (1,))
        for begin, times in enumerate(run_sums(costs))
        for length, time in enumerate(times)
        if length
    }
    workers = 1
    for parts, bandwidth in levels:
        level = _Level(parts, bandwidth, workers, below, activation_bytes, weight_bytes)
        below = level.plans(activation_compression, memory_bytes)
        workers = parts
    best = below[0, len(costs)]
    return ReplicatedCut(sizes=best.sizes, replicas=best.replicas, bottleneck=best.time)


class _Plan(NamedTuple):
    """Stages of a range of layers."""

    time: float
    sizes: tuple[int, ...]
    replicas: tuple[int, ...]


class _Level:
    """The recursion on one level of links."""

    def __init__(
        self,
        parts: int,
        bandwidth: float,
        workers: int,
        below: dict[tuple[int, int], _Plan],
        activation_bytes: Sequence[float],
        weight_bytes: Sequence[float],
    ):
        self.parts, self.bandwidth, self.workers, self.below = parts, bandwidth, workers, below
        self.activation_bytes = activation_bytes
        self.activations, self.weights = run_sums(activation_bytes), run_sums(weight_bytes)

    def plans(self, compression: float | None, memory_bytes: float) -> dict[tuple[int, int], _Plan]:
        """The best plan of each range of layers on all parts."""
        layers = len(self.activation_bytes)
        best: dict[tuple[int, int, int], _Plan] = {}
        for begin in range(layers):
            for end in range(begin + 1, layers + 1):
                for count in range(1, self.parts + 1):
                    ways = list(self._ways(best, begin, end, count, compression, memory_bytes))
                    if ways:
                        best[begin, end, count] = min(ways, key=lambda plan: plan.time)  # the first among equals
        return {(begin, end): plan for (begin, end, count), plan in best.items() if count == self.parts}

    def _ways(
        self,
        best: dict[tuple[int, int, int], _Plan],
        begin: int,
        end: int,
        count: int,
        compression: float | None,
        memory_bytes: float,
    ) -> Iterator[_Plan]:
        """One stage, and the best plans of fewer layers with one more stage, that fit."""
        left = self.parts - count
        if self._stash(begin, end, left, count) <= memory_bytes:
            yield self._stage(begin, end, count, self.workers)
        for middle in range(begin + 1, end):
            for last in range(1, count):
                first = best.get((begin, middle, count - last))
                if first is not None and self._stash(middle, end, left, last) <= memory_bytes:
                    stage = self._stage(middle, end, last, 1)
                    moved = 0.0 if compression is None else self._transfer(middle, end, last) / compression
                    time = max(first.time, stage.time, moved)
                    yield _Plan(time, first.sizes + stage.sizes, first.replicas + stage.replicas)

    def _stage(self, begin: int, end: int, count: int, divisor: int) -> _Plan:
        """One stage on some parts; its synchronisation is divided once more."""
        once = self.below[begin, end]
        sync = 4 * (count - 1) * self.weights[begin][end - begin] / (self.bandwidth * count) / divisor
        return once._replace(time=(once.time + sync) / count, replicas=tuple(count * r for r in once.replicas))

    def _transfer(self, begin: int, end: int, count: int) -> float:
        """To a stage, or from it if it isn't the last: the longer one."""
        sent = self.activation_bytes[end - 1] if end < len(self.activation_bytes) else 0.0
        return 2 * max(self.activation_bytes[begin - 1], sent) / (self.bandwidth * count)

    def _stash(self, begin: int, end: int, left: int, count: int) -> float:
        """Bytes that a stage stashes."""
        held = self.activations[begin][end - begin] + self.weights[begin][end - begin]
        return math.ceil(left / count) * held if left else 0.0
