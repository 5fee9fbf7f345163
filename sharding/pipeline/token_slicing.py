"""Optimal token slices for TeraPipe (dynamic programming)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..errors import ShardingError
from .task_table import check_positive

Times = Sequence[Sequence[float]]
"""Time of the slice that ends after `end` units and has length `k`, at [end - 1][k - 1]."""


class TokenSlices(NamedTuple):
    """Lengths of the slices, first to last, and the step time with them."""

    lengths: tuple[int, ...]
    makespan: float


class JointSlices(NamedTuple):
    """Per microbatch its number of sequences and slice lengths, and the step time with them."""

    microbatches: tuple[tuple[int, tuple[int, ...]], ...]
    makespan: float


def token_slices(
    *, tokens: int, stages: int, duration: Callable[[int, int], float], unit: int = 1, tolerance: float = 0.0
) -> TokenSlices:
    """The slices that minimise sum(t) + (stages - 1) max(t), with t the slices' times on one stage.

    For every candidate of the maximum time, a dynamic program over the tokens minimises the sum over slices that do not
    exceed it. Takes O((tokens / unit)^2) steps per candidate, with as many candidates.

    Args:
        tokens: per sequence, a multiple of ``unit``.
        stages: of the pipeline.
        duration: (length, tokens before the slice) -> forward and backward time of a slice on one stage.
        unit: lengths are multiples of it.
        tolerance: skips candidates closer than this; the result may be up to (stages - 1) tolerance slower.

    References:
        Li et al., TeraPipe, ICML 2021 (2102.07988), section 3.3.
    """
    _check_sizes("pipeline.token_slices", tokens, unit, stages=stages)
    times = _times(tokens, unit, duration)
    lengths, makespan = _minimise([times], stages, tolerance, lambda longest: _least_sum(times, longest))
    return TokenSlices(_in_tokens(lengths, unit), makespan)


def joint_slices(
    *,
    batch: int,
    tokens: int,
    stages: int,
    duration: Callable[[int, int, int], float],
    equal: bool = False,
    unit: int = 1,
    tolerance: float = 0.0,
) -> JointSlices:
    """Microbatches of a batch and slices of their tokens that minimise sum(t) + (stages - 1) max(t).

    For every candidate of the maximum time, runs ``token_slices``'s dynamic program for each microbatch size, then one
    over the batch.

    Args:
        batch: sequences per step.
        tokens: see ``token_slices``.
        stages: see ``token_slices``.
        duration: (sequences of the microbatch, length, tokens before the slice) -> forward and backward time of a slice
            on one stage.
        equal: whether all microbatches must be equal, as ``schedules.terapipe`` requires.
        unit: see ``token_slices``.
        tolerance: see ``token_slices``.

    References:
        Li et al., TeraPipe, ICML 2021 (2102.07988), section 3.4. There each microbatch's slices are optimised
        separately; here all share one maximum time, which gives the global optimum.
    """
    _check_sizes("pipeline.joint_slices", tokens, unit, batch=batch, stages=stages)
    times = {
        size: _times(tokens, unit, partial(duration, size))
        for size in range(1, batch + 1)
        if not (equal and batch % size)
    }

    def solve(longest: float) -> tuple[list[tuple[int, list[int]]], float]:
        slicings = {size: _least_sum(own, longest) for size, own in times.items()}
        sizes, total = _repeat_size(slicings, batch) if equal else _fill_batch(slicings, batch)
        return [(size, slicings[size][0]) for size in sizes], total

    found, makespan = _minimise(list(times.values()), stages, tolerance, solve)
    return JointSlices(tuple((size, _in_tokens(lengths, unit)) for size, lengths in found), makespan)


def sliced(tokens: Any, lengths: Sequence[int]) -> list[tuple[Any, Any]]:
    """Per slice its tokens and their first position, the inputs of ``value_and_grad`` for a sliced model.

    Args:
        tokens: [microbatches, ..., tokens].
        lengths: of the slices, first to last.

    Returns:
        Pairs of [microbatches, ..., tokens of the slice] and int32 [microbatches].

    Raises:
        ShardingError: lengths that do not add up to the number of tokens.
    """
    if sum(lengths) != tokens.shape[-1] or min(lengths, default=0) < 1:
        there = f"lengths {tuple(lengths)} with a sum of {sum(lengths)}; {tokens.shape[-1]} tokens"
        raise ShardingError("pipeline.sliced", found=there, required="positive lengths that add up to the tokens")
    starts = [0, *accumulate(lengths)]
    return [
        (tokens[..., start:end], jnp.full(len(tokens), start, jnp.int32))
        for start, end in zip(starts, starts[1:], strict=False)
    ]


def _check_sizes(asked: str, tokens: int, unit: int, **numbers: int) -> None:
    check_positive(asked, tokens=tokens, unit=unit, **numbers)
    if rest := tokens % unit:
        raise ShardingError(f"{asked}(tokens)", found=f"{tokens} % {unit} = {rest}", required="a multiple of unit")


def _times(tokens: int, unit: int, duration: Callable[[int, int], float]) -> Times:
    units = tokens // unit
    return [[duration(k * unit, (end - k) * unit) for k in range(1, end + 1)] for end in range(1, units + 1)]


def _in_tokens(lengths: Sequence[int], unit: int) -> tuple[int, ...]:
    return tuple(unit * length for length in lengths)


def _minimise(
    times: Sequence[Times], stages: int, tolerance: float, solve: Callable[[float], tuple[list[Any], float]]
) -> tuple[list[Any], float]:
    """The plan with the least total + (stages - 1) longest over all candidates of the maximum time."""
    best, makespan, tried = [], math.inf, -math.inf
    for longest in sorted({time for own in times for row in own for time in row}):
        if stages * longest >= makespan:  # the sum includes the longest time
            break
        if longest < tried + tolerance:
            continue
        tried = longest
        plan, total = solve(longest)
        if total + (stages - 1) * longest < makespan:
            best, makespan = plan, total + (stages - 1) * longest
    return best, makespan


def _repeat_size(slicings: Mapping[int, tuple[list[int], float]], batch: int) -> tuple[list[int], float]:
    """Equal microbatch sizes with the least sum of times, and the sum."""
    total, size = min((total * (batch // size), size) for size, (_, total) in slicings.items())
    return [size] * (batch // size), total


def _fill_batch(slicings: Mapping[int, tuple[list[int], float]], batch: int) -> tuple[list[int], float]:
    """Microbatch sizes that fill the batch with the least sum of times, and the sum."""
    least: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for filled in range(1, batch + 1):
        ways = ((least[filled - size][0] + slicings[size][1], size) for size in range(1, filled + 1))
        total, size = min(ways)
        least.append((total, (*least[filled - size][1], size)))
    total, sizes = least[batch]
    return list(sizes), total


def _least_sum(times: Times, longest: float) -> tuple[list[int], float]:
    """Lengths with the least sum of times, none above ``longest``, and the sum; no lengths if impossible.

    Args:
        times: of the slices.
        longest: maximum time of a slice.
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
