"""PipeDream's partitioning algorithm: stages and their replicas on a hierarchy of links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import ShardingError
from ..task_table import check_positive
from .even_stages import ranges
from .layer_costs import check_bandwidths, check_layers, run_sums


class Level(NamedTuple):
    """A level of the hierarchy, with identical parts: workers in a server, servers in a rack."""

    parts: int
    bandwidth: float
    """Between two parts, in bytes per unit of time."""


@dataclass(frozen=True, kw_only=True)
class ReplicatedCut:
    """Consecutive layers as stages, first to last, each replicated over workers."""

    sizes: tuple[int, ...]
    """Layers of each stage."""
    replicas: tuple[int, ...]
    """Workers of each stage; minibatches are assigned round-robin."""
    bottleneck: float
    """Time per minibatch in the steady state: the slowest stage or transfer."""

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage, counted from 0."""
        return ranges(self.sizes)

    @property
    def minibatches_in_flight(self) -> int:
        """Minibatches that keep all workers busy (NOAM): workers / workers of the first stage, rounded up."""
        return -(-sum(self.replicas) // self.replicas[0])


def pipedream(
    costs: Sequence[float],
    *,
    activation_bytes: Sequence[float],
    weight_bytes: Sequence[float],
    levels: Sequence[Level | tuple[int, float]],
) -> ReplicatedCut:
    """The stages and replicas with the least time per minibatch of a pipeline without flushes.

    With T(i, j, m) the time of layers i..j-1 as one stage on m parts of a level, A(i, j, m) that of their best stages
    on m parts, W their weight bytes, a_s the activation bytes of the layer before s, B the level's bandwidth, and n the
    number of parts one level below:

        T(i, j, m) = 1/m max(A of the level below (i, j, n), 2 (m - 1) W / B)
        A(i, j, m) = min(T(i, j, m), min over s, r of max(A(i, s, m - r), 2 a_s / B, T(s, j, r)))

    and below the lowest level A(i, j) = cost of i..j-1. The result is A at the top level for all layers and parts, with
    all workers in use. Takes layers^3 parts^2 steps per level, and layers^2 parts^2 at the top.

    Args:
        costs: forward and backward time of each layer for one minibatch on one worker.
        activation_bytes: activations from each layer to the next for one minibatch; gradients are as large. The last
            entry is unused.
        weight_bytes: of each layer.
        levels: (parts, bandwidth), lowest first: ``[(4, 5e9), (2, 1.25e9)]`` is two servers with four workers each.

    Example:
        >>> plan = pipedream([8, 8, 8, 1], activation_bytes=[1] * 4, weight_bytes=[1, 1, 1, 99], levels=[(4, 10)])
        >>> plan.sizes, plan.replicas, plan.bottleneck, plan.minibatches_in_flight
        ((3, 1), (3, 1), 8.0, 2)

    Raises:
        ShardingError: no layers, lists of unequal lengths, negative or non-finite numbers, no levels, levels without
            parts or bandwidth.

    References:
        Narayanan et al., PipeDream, SOSP 2019 (1806.03377), section 3.1. The released program differs: see
        ``pipedream_released``.
    """
    asked = "cutting.pipedream"
    check_layers(asked, costs=costs, activation_bytes=activation_bytes, weight_bytes=weight_bytes)
    check_levels(asked, levels)
    weights = run_sums(weight_bytes)
    below: _Best = {
        (begin, begin + length): _Stages(time, (length,), (1,))
        for begin, times in enumerate(run_sums(costs))
        for length, time in enumerate(times)
        if length
    }
    for height, (parts, bandwidth) in enumerate(levels, 1):
        begins = range(len(costs)) if height < len(levels) else range(1)
        below = _level(below, begins, parts, bandwidth, activation_bytes, weights)
    best = below[0, len(costs)]
    return ReplicatedCut(sizes=best.sizes, replicas=best.replicas, bottleneck=best.time)


def check_levels(asked: str, levels: Sequence[Level | tuple[int, float]]) -> None:
    """Raises unless there are levels, each with parts and bandwidth."""
    if not levels:
        raise ShardingError(f"{asked}(levels)", found="no levels", required="at least one (parts, bandwidth)")
    for number, (parts, bandwidth) in enumerate(levels):
        check_positive(f"{asked}: levels[{number}]", parts=parts)
        check_bandwidths(f"{asked}: levels[{number}]", bandwidth=bandwidth)


class _Stages(NamedTuple):
    """Stages of a range of layers on a number of parts, with the workers of all parts."""

    time: float
    sizes: tuple[int, ...]
    replicas: tuple[int, ...]


_Best = dict[tuple[int, int], _Stages]
"""By the first layer and the end of the range."""


def _level(
    below: _Best,
    begins: range,
    parts: int,
    bandwidth: float,
    activation_bytes: Sequence[float],
    weights: list[list[float]],
) -> _Best:
    """The best stages for ranges of layers on all parts of a level, from those on one part."""
    layers = len(activation_bytes)
    transfers = [2 * num_bytes / bandwidth for num_bytes in activation_bytes]

    def replicated(begin: int, end: int, count: int) -> _Stages:
        """T: one stage on `count` parts."""
        once = below[begin, end]
        sync = 2 * (count - 1) * weights[begin][end - begin] / bandwidth
        return once._replace(time=max(once.time, sync) / count, replicas=tuple(count * r for r in once.replicas))

    single_stage = {
        (begin, end, count): replicated(begin, end, count) for begin, end in below for count in range(1, parts + 1)
    }
    best: dict[tuple[int, int, int], _Stages] = {}  # A: prefixes come before the ranges that extend them
    for begin in begins:
        for end in range(begin + 1, layers + 1):
            for count in range(1, parts + 1):
                best[begin, end, count] = _best_stages(best, single_stage, transfers, begin, end, count)
    return {(begin, end): stages for (begin, end, count), stages in best.items() if count == parts}


def _best_stages(
    best: dict[tuple[int, int, int], _Stages],
    single_stage: dict[tuple[int, int, int], _Stages],
    transfers: Sequence[float],
    begin: int,
    end: int,
    parts: int,
) -> _Stages:
    """A: all layers as one stage, or the best stages of a prefix and one stage for the rest."""
    found = single_stage[begin, end, parts]
    for middle in range(begin + 1, end):
        for count in range(1, parts):
            first, last = best[begin, middle, parts - count], single_stage[middle, end, count]
            time = max(first.time, transfers[middle - 1], last.time)
            if time < found.time:
                found = _Stages(time, first.sizes + last.sizes, first.replicas + last.replicas)
    return found
