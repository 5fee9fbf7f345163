"""Where to cut a sequence into slices that follow each other through a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..errors import ShardingError
from .table import at_least_one

Times = Sequence[Sequence[float]]
"""Of the slice that ends after `end` units and is `k` long, at [end - 1][k - 1]."""


class TokenSlices(NamedTuple):
    """Lengths of slices, first to last, and what a step with them takes."""

    lengths: tuple[int, ...]
    makespan: float


class JointSlices(NamedTuple):
    """Per microbatch its number of sequences and the lengths of its slices, and what a step with them takes."""

    microbatches: tuple[tuple[int, tuple[int, ...]], ...]
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
    _valid("pipeline.token_slices", tokens, unit, stages=stages)
    times = _times(tokens, unit, duration)
    lengths, makespan = _best([times], stages, tolerance, lambda longest: _least_sum(times, longest))
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
    """A batch in microbatches and these in slices of tokens, for which sum(t) + (stages - 1) max(t) is least.

    For every time that may be the longest one, ``token_slices``'s dynamic program for each number of sequences, then
    one over the batch.

    Args:
        batch: sequences of a step.
        tokens: see ``token_slices``.
        stages: the same.
        duration: of a slice forward and backward on one stage, given the sequences of its microbatch, its length and
            the tokens before it.
        equal: whether all microbatches are alike, as ``schedules.terapipe`` has them.
        unit: see ``token_slices``.
        tolerance: the same.

    References:
        Li et al., TeraPipe, ICML 2021 (2102.07988), section 3.4. There each microbatch's slices are the best for it
        alone; here all have one longest time, which gives the least of the whole.
    """
    _valid("pipeline.joint_slices", tokens, unit, batch=batch, stages=stages)
    times = {
        size: _times(tokens, unit, partial(duration, size))
        for size in range(1, batch + 1)
        if not (equal and batch % size)
    }

    def solve(longest: float) -> tuple[list[tuple[int, list[int]]], float]:
        cut = {size: _least_sum(own, longest) for size, own in times.items()}
        sizes, total = _repeated(cut, batch) if equal else _filled(cut, batch)
        return [(size, cut[size][0]) for size in sizes], total

    found, makespan = _best(list(times.values()), stages, tolerance, solve)
    return JointSlices(tuple((size, _in_tokens(lengths, unit)) for size, lengths in found), makespan)


def sliced(tokens: Any, lengths: Sequence[int]) -> list[tuple[Any, Any]]:
    """Per slice its tokens and where they begin, as ``value_and_grad`` wants inputs for a model that is cut so.

    Args:
        tokens: [microbatches, ..., tokens].
        lengths: of the slices, first to last.

    Returns:
        Pairs of [microbatches, ..., tokens of the slice] and int32 [microbatches].

    Raises:
        ShardingError: lengths that don't add up to the tokens.
    """
    if sum(lengths) != tokens.shape[-1] or min(lengths, default=0) < 1:
        there = f"lengths {tuple(lengths)}, {sum(lengths)} in all; {tokens.shape[-1]} tokens"
        raise ShardingError("pipeline.sliced", there=there, must="lengths of at least 1 that add up to the tokens")
    starts = [0, *accumulate(lengths)]
    return [
        (tokens[..., start:end], jnp.full(len(tokens), start, jnp.int32))
        for start, end in zip(starts, starts[1:], strict=False)
    ]


def _valid(asked: str, tokens: int, unit: int, **numbers: int) -> None:
    at_least_one(asked, tokens=tokens, unit=unit, **numbers)
    if rest := tokens % unit:
        raise ShardingError(f"{asked}(tokens)", there=f"{tokens} % {unit} = {rest}", must="a multiple of unit")


def _times(tokens: int, unit: int, duration: Callable[[int, int], float]) -> Times:
    units = tokens // unit
    return [[duration(k * unit, (end - k) * unit) for k in range(1, end + 1)] for end in range(1, units + 1)]


def _in_tokens(lengths: Sequence[int], unit: int) -> tuple[int, ...]:
    return tuple(unit * length for length in lengths)


def _best(
    times: Sequence[Times], stages: int, tolerance: float, solve: Callable[[float], tuple[list[Any], float]]
) -> tuple[list[Any], float]:
    """The plan of the least total + (stages - 1) longest over all times that may be the longest one."""
    best, makespan, tried = [], math.inf, -math.inf
    for longest in sorted({time for own in times for row in own for time in row}):
        if stages * longest >= makespan:  # the sum has the longest one too
            break
        if longest < tried + tolerance:
            continue
        tried = longest
        plan, total = solve(longest)
        if total + (stages - 1) * longest < makespan:
            best, makespan = plan, total + (stages - 1) * longest
    return best, makespan


def _repeated(cut: Mapping[int, tuple[list[int], float]], batch: int) -> tuple[list[int], float]:
    """Microbatches of one size, and the sum of their times."""
    total, size = min((total * (batch // size), size) for size, (_, total) in cut.items())
    return [size] * (batch // size), total


def _filled(cut: Mapping[int, tuple[list[int], float]], batch: int) -> tuple[list[int], float]:
    """Sizes of microbatches that fill the batch, and the least sum of their times."""
    least: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for filled in range(1, batch + 1):
        ways = ((least[filled - size][0] + cut[size][1], size) for size in range(1, filled + 1))
        total, size = min(ways)
        least.append((total, (*least[filled - size][1], size)))
    total, sizes = least[batch]
    return list(sizes), total


def _least_sum(times: Times, longest: float) -> tuple[list[int], float]:
    """Lengths whose times add up to the least, none over ``longest``, and the sum; no lengths where there are none.

    Args:
        times: of the slices.
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
