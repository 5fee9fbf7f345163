"""The moves between specs of an array that a reshard is made of: slices and single collectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ..cost import Kind
from ..spec import Axis, axis_size, local_bytes, local_shape, num_parts

DimAxes = tuple[tuple[Axis, ...], ...]
"""The axes of each dim, major to minor."""

Move = tuple[Kind | Literal["slice"], tuple[Axis, ...], DimAxes]
"""The kind of a step, the axes of its device groups, the dims' axes after it."""

MAX_ORDERED = 4
"""Most axes of a dim of which every order is a move."""


def moves(at: DimAxes, goal: DimAxes, sizes: Mapping[str, int]) -> Iterator[Move]:
    """Yields the steps among which a cheapest chain is, where all links cost the same; a good one where they do not.

    No axis is used that neither spec has, and no dim is sharded further on the way than in the end.
    """
    used = tuple(a for axes in at for a in axes)
    idle = [a for axes in goal for a in axes if a not in used]
    shards, goal_shards = _num_shards(at, sizes), _num_shards(goal, sizes)
    for d, axes in enumerate(at):
        for a in idle:
            in_place = goal[d][: len(axes) + 1] == (*axes, a)
            if in_place or goal_shards[d] % (shards[d] * axis_size(a, sizes)) == 0:
                yield "slice", (a,), with_dim(at, d, (*axes, a))
        for k in range(1, len(axes) + 1):
            kept, moved = axes[:-k], axes[-k:]
            yield "all-gather", moved, with_dim(at, d, kept)
            for e in range(len(at)):
                if e != d:
                    yield "all-to-all", moved, with_dim(with_dim(at, d, kept), e, (*at[e], *moved))
        for other in _orders(axes, goal, d):
            if other != axes:
                yield "collective-permute", axes, with_dim(at, d, other)
    for after in _extended_goals(goal, shards, [a for a in used if not any(a in axes for axes in goal)], sizes):
        changed = dict.fromkeys(a for x, y in zip(at, after, strict=True) if x != y for a in (*x, *y))
        if changed:
            yield "collective-permute", tuple(changed), after


def _orders(axes: tuple[Axis, ...], goal: DimAxes, dim: int) -> Iterable[tuple[Axis, ...]]:
    """The orders of a dim's axes; of many, those with the ones that stay in front, or that go to one dim behind."""
    if len(axes) <= MAX_ORDERED:
        return itertools.permutations(axes)
    ends = [[a for a in own if a in axes] for own in goal]
    return [(*[a for a in axes if a not in end], *end) for d, end in enumerate(ends) if d != dim] + [
        (*ends[dim], *[a for a in axes if a not in ends[dim]])
    ]


def _extended_goals(
    goal: DimAxes, shards: Sequence[int], others: Sequence[Axis], sizes: Mapping[str, int]
) -> Iterator[DimAxes]:
    """Yields every spec with the given numbers of shards that becomes the goal by all-gathers of minor axes."""
    d = next((d for d, n in enumerate(_num_shards(goal, sizes)) if n != shards[d]), None)
    if d is None:
        yield goal
        return
    for a in others:
        more = (*goal[d], a)
        if shards[d] % num_parts(more, sizes) == 0:
            yield from _extended_goals(with_dim(goal, d, more), shards, [b for b in others if b != a], sizes)


def _num_shards(dims: DimAxes, sizes: Mapping[str, int]) -> list[int]:
    return [num_parts(axes, sizes) for axes in dims]


def with_dim(dims: DimAxes, dim: int, axes: tuple[Axis, ...]) -> DimAxes:
    """Returns the specs with the axes of one dim replaced."""
    return (*dims[:dim], axes, *dims[dim + 1 :])


def as_run(before: DimAxes, move: Move, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Move:
    """Returns the move as XLA runs it: it all-reduces dims of which most devices have nothing (`ReplicatePartial`)."""
    kind, axes, after = move
    if kind != "all-gather":
        return move
    pairs = zip(before, after, local_shape(after, shape, sizes), strict=True)
    is_short = any(old != new and length <= num_parts(axes, sizes) // 2 for old, new, length in pairs)
    return ("all-reduce", axes, after) if is_short else move


def is_gathered(before: DimAxes, after: DimAxes, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    """Whether XLA would gather all of an array in place of an all-to-all: shards of a dim that stays sharded don't fit.

    A dim that gives up some of its axes must be even; shards of a dim that gets more must be parts of those before.
    """

    def fits(old: tuple[Axis, ...], new: tuple[Axis, ...], n: int) -> bool:
        parts, others = num_parts(old, sizes), num_parts(new, sizes)
        if not old or not new or parts == others:
            return True
        return not n % parts if others < parts else -(-n // parts) == -(-n // others) * (others // parts)

    return not all(map(fits, before, after, shape))


def bytes_after(before: DimAxes, move: Move, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]) -> int:
    """Returns the bytes per device after a step; all-gathers and all-to-alls include the padding of uneven shards."""
    kind, axes, after = move
    if kind == "all-gather":
        return local_bytes(before, shape, itemsize, sizes) * num_parts(axes, sizes)
    if kind == "all-to-all":
        pairs = zip(local_shape(before, shape, sizes), local_shape(after, shape, sizes), before, after, strict=True)
        grows = [old * num_parts(axes, sizes) if len(b) > len(a) else new for old, new, b, a in pairs]
        return itemsize * math.prod(grows)
    return local_bytes(after, shape, itemsize, sizes)
