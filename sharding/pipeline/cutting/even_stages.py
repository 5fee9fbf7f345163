"""Partitioning into stages of even cost (dynamic programming)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from ...errors import ShardingError
from ..task_table import check_positive
from .layer_costs import check_layers, run_sums


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Consecutive layers as stages, first to last."""

    sizes: tuple[int, ...]
    """Layers of each stage."""
    costs: tuple[float, ...]
    """Of each stage, in the unit of the given costs."""

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage, counted from 0."""
        return ranges(self.sizes)

    @property
    def bottleneck(self) -> float:
        """The cost of the largest stage."""
        return max(self.costs)


def cut(costs: Sequence[float], *, stages: int) -> Cut:
    """The stages with the lexicographically least costs, sorted from the largest: the least bottleneck first.

    With C(s, j) the costs of the best s stages for the first j layers, in descending order, compared lexicographically:
    C(s, j) = min over i of sort(C(s - 1, i) + [cost of layers i..j-1]), which is exact, since inserting the same number
    into two sorted lists preserves their order. Among equals, earlier stages get more layers.
    Takes at most stages^2 layers^2 steps.

    Args:
        costs: of each layer in model order, in any unit: forward and backward time, or FLOPs.
        stages: each gets at least one layer.

    Example:
        >>> cut([1, 1, 1, 1, 2, 2], stages=4).sizes
        (2, 2, 1, 1)

    Raises:
        ShardingError: no layers, more stages than layers, negative or non-finite costs.

    References:
        Huang et al., GPipe, NeurIPS 2019 (1811.06965), section 2.1, which calls for cells of even cost and does not
        specify how to find them.
    """
    asked = "pipeline.cut"
    layers = check_layers(asked, costs=costs)
    check_positive(asked, stages=stages)
    if stages > layers:
        raise ShardingError(
            f"{asked}(stages={stages})",
            found=f"{layers} layers",
            required="at least one layer in each stage",
            fix=f"stages={layers} or fewer",
        )
    sums = run_sums(costs)
    sizes = _most_even(sums, stages)
    return Cut(sizes=sizes, costs=tuple(sums[run.start][len(run)] for run in ranges(sizes)))


def ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    """Consecutive ranges of these lengths, from 0."""
    return tuple(range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0)))


class _Stages(NamedTuple):
    """The best stages for the first layers."""

    costs: tuple[float, ...]
    """In descending order."""
    sizes: tuple[int, ...]
    """In order of stages."""


def _most_even(sums: list[list[float]], stages: int) -> tuple[int, ...]:
    """The sizes of the best stages for all layers."""
    layers = len(sums) - 1
    best = {0: _Stages((), ())}
    for number in range(1, stages + 1):
        best = {end: _best_stages(best, sums, end) for end in range(number, layers + 1)}
    return best[layers].sizes


def _best_stages(before: dict[int, _Stages], sums: list[list[float]], end: int) -> _Stages:
    """The best stages for layers up to ``end``, extending the best ones with one stage fewer."""
    best = None
    for begin in range(end - 1, min(before) - 1, -1):
        last = sums[begin][end - begin]
        if best is not None and last > best.costs[0]:
            break  # longer last stages cost at least as much
        if begin in before:
            earlier = before[begin]
            costs = tuple(sorted((*earlier.costs, last), reverse=True))
            if best is None or costs < best.costs:
                best = _Stages(costs, (*earlier.sizes, end - begin))
    assert best is not None  # there are enough layers
    return best
