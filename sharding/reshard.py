"""How an array gets from one split to another: the cheapest chain of steps that XLA takes as they are.

A step changes a spec so that one collective does it, or none:

    slice                 an axis that splits nothing splits a dim: each device keeps its part
    all-gather            the minor axes of a dim are gathered
    all-to-all            the minor axes of one dim become the minor axes of another
    collective-permute    dims keep the lengths of their parts, devices change places

Any reshard left to XLA in one piece may be done by gathering the whole array ("involuntary full rematerialization"),
or end the process in a failed check. One such step at a time is done as it is said, on every release
(`tests/test_reshard.py`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .cost import Kind, wire_bytes
from .propagation.atoms import AtomTable
from .spec import Axis, Dim, Spec, axis_size, cuts, local_shape, num_parts

Split = tuple[tuple[Axis, ...], ...]
"""Per dim its axes, major to minor."""

_Move = tuple[Kind | Literal["slice"], tuple[Axis, ...], Split]
"""The kind of a step, the axes that its groups of devices run along, the split after it."""

STEP_BYTES = 2**8
"""The least that a step costs, so that of ways on which devices send alike the shorter is taken."""
MOST_PIECES = 4
"""How many axes and pieces of axes are searched for a way: their splits grow faster than factorials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step on the way."""

    kind: Kind | Literal["slice"]
    axes: tuple[Axis, ...]
    """The mesh axes that its groups of devices run along; of a slice those that come in."""
    spec: Spec
    """How the array is split after it."""
    num_bytes: int
    """What one device then holds; of a reduce-scatter what it held before."""
    wire_bytes: int
    """What each device sends."""


def chain(
    have: Spec,
    want: Spec,
    shape: tuple[int, ...],
    itemsize: int,
    sizes: Mapping[str, int],
    *,
    permutes: bool = True,
) -> tuple[Step, ...]:
    """The cheapest steps from one split of an array to another; none where they are the same.

    Args:
        have: how the array is split.
        want: how it has to be.
        shape: of the whole array.
        itemsize: bytes of an element.
        sizes: of the mesh axes.
        permutes: whether a step may be a collective-permute. Not where some devices run the program and others don't:
            it waits for all devices, other collectives for those of their own group. Nor are axes cut then.

    Cheapest by the bytes that a device sends, where each step counts as `STEP_BYTES` more (Dijkstra, over the splits
    that can be met on the way; with the three or four axes of a mesh there are few).
    """
    pieces = cuts(itertools.chain.from_iterable((*have.axes, *want.axes)), sizes)
    start, goal = _cut(have.axes, pieces, sizes), _cut(want.axes, pieces, sizes)
    if start == goal:
        return ()
    named = tuple(sizes.items())
    steps = _chain(start, goal, shape, itemsize, named, permutes)
    if not permutes:
        is_even = _is_even((start, *(step.spec.axes for step in steps)), shape, sizes)
        return steps if is_even else _regathered(start, goal, shape, itemsize, sizes)
    pieces = _halves(start, goal, sizes)
    if not pieces or sum(step.num_bytes for step in steps if step.kind != "slice") <= steps[-1].num_bytes:
        return steps
    finer = _chain(_cut(start, pieces, sizes), _cut(goal, pieces, sizes), shape, itemsize, named, permutes)
    return min(steps, finer, key=_cost)


def _is_even(splits: Sequence[Split], shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    """Whether all parts of each dim that changes are as long in every split."""
    changing = [(n, ways) for n, ways in zip(shape, zip(*splits, strict=True), strict=True) if len({*ways}) > 1]
    return not any(n % num_parts(axes, sizes) for n, ways in changing for axes in ways)


def _regathered(
    start: Split, goal: Split, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]
) -> tuple[Step, ...]:
    """Each dim that changes gathered whole, then cut at once.

    Where parts are of unequal length, those of one split begin and end in the midst of another's: XLA lets neighbours
    exchange what they lack.
    """
    changed = [d for d, (old, new) in enumerate(zip(start, goal, strict=True)) if old != new]
    gathers: list[_Move] = []
    slices: list[_Move] = []
    split = start
    for d in changed:
        split = _with(split, d, ())
        if start[d]:
            gathers.append(("all-gather", start[d], split))
    for d in changed:
        split = _with(split, d, goal[d])
        if goal[d]:
            slices.append(("slice", goal[d], split))
    befores = (start, *(after for _, _, after in (*gathers, *slices)))
    pairs = zip(befores, (*gathers, *slices), strict=False)
    return tuple(_step(move, _held(before, move, shape, itemsize, sizes), sizes) for before, move in pairs)


def _cost(steps: Iterable[Step]) -> int:
    return sum(step.wire_bytes + (STEP_BYTES if step.kind != "slice" else 0) for step in steps)


def _halves(start: Split, goal: Split, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Where to cut the axes that change places, so that a long one can take the place of a short one.

    Empty where there is nothing to gain, or more pieces than ways between their splits can be searched.
    """
    moving = dict.fromkeys(a for x, y in zip(start, goal, strict=True) if x != y for a in (*x, *y))
    lengths = {axis_size(a, sizes) for a in moving}
    parts = [_part(a, sizes) for a in moving]
    shorter = [(name, pre, n) for name, pre, size in parts for n in lengths if n < size and size % n == 0]
    if not shorter or len(parts) + len(shorter) > MOST_PIECES:
        return {}
    return cuts((*parts, *shorter), sizes)


@lru_cache(maxsize=4096)
def _chain(
    start: Split, goal: Split, shape: tuple[int, ...], itemsize: int, named: tuple[tuple[str, int], ...], permutes: bool
) -> tuple[Step, ...]:
    sizes = dict(named)
    number = itertools.count()  # of equal costs the first found
    waiting: list[tuple[int, int, Split]] = [(0, next(number), start)]
    best: dict[Split, int] = {start: 0}
    came: dict[Split, tuple[Split, _Move]] = {}
    while waiting:
        spent, _, split = heapq.heappop(waiting)
        if split == goal:
            break
        if spent > best[split]:
            continue
        for move in _moves(split, goal, sizes):
            kind, axes, after = move
            cost = spent
            if kind == "collective-permute" and not permutes:
                continue
            if kind != "slice":
                held = _held(split, move, shape, itemsize, sizes)
                cost += wire_bytes(kind, held, num_parts(axes, sizes)) + STEP_BYTES
            if cost < best.get(after, cost + 1) and cost < best.get(goal, cost + 1):
                best[after], came[after] = cost, (split, move)
                heapq.heappush(waiting, (cost, next(number), after))
    steps: list[Step] = []
    while goal != start:
        goal, move = came[goal]
        steps.append(_step(move, _held(goal, move, shape, itemsize, sizes), sizes))
    return tuple(reversed(steps))


def _held(before: Split, move: _Move, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]) -> int:
    """Bytes that one device has after a step; a gather brings what fills up parts of unequal length too."""
    kind, axes, after = move
    if kind == "all-gather":
        return local_bytes(before, shape, itemsize, sizes) * num_parts(axes, sizes)
    return local_bytes(after, shape, itemsize, sizes)


def _step(move: _Move, num_bytes: int, sizes: Mapping[str, int]) -> Step:
    kind, axes, after = move
    sent = 0 if kind == "slice" else wire_bytes(kind, num_bytes, num_parts(axes, sizes))
    table = AtomTable.of(sizes)
    spec = Spec(dims=tuple(Dim(axes=table.join(table.split(dim))) for dim in after))
    return Step(kind=kind, axes=table.join(table.split(axes)), spec=spec, num_bytes=num_bytes, wire_bytes=sent)


def local_bytes(split: Split, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]) -> int:
    """Bytes of an array's part on one device."""
    return itemsize * math.prod(local_shape(split, shape, sizes))


def _moves(split: Split, goal: Split, sizes: Mapping[str, int]) -> Iterator[_Move]:
    """Every step that may be on a cheapest way."""
    used = tuple(a for axes in split for a in axes)
    idle = [a for axes in goal for a in axes if a not in used]
    lengths, wanted = _lengths(split, sizes), _lengths(goal, sizes)
    for d, axes in enumerate(split):
        for a in idle:
            in_place = goal[d][: len(axes) + 1] == (*axes, a)
            if in_place or wanted[d] % (lengths[d] * axis_size(a, sizes)) == 0:
                yield "slice", (a,), _with(split, d, (*axes, a))
        for k in range(1, len(axes) + 1):
            kept, moved = axes[:-k], axes[-k:]
            yield "all-gather", moved, _with(split, d, kept)
            for e in range(len(split)):
                if e != d:
                    yield "all-to-all", moved, _with(_with(split, d, kept), e, (*split[e], *moved))
        for other in itertools.permutations(axes):
            if other != axes:
                yield "collective-permute", axes, _with(split, d, other)
    for after in _filled(goal, lengths, [a for a in used if not any(a in axes for axes in goal)], sizes):
        changed = dict.fromkeys(a for x, y in zip(split, after, strict=True) if x != y for a in (*x, *y))
        if changed:
            yield "collective-permute", tuple(changed), after


def _filled(goal: Split, lengths: Sequence[int], others: Sequence[Axis], sizes: Mapping[str, int]) -> Iterator[Split]:
    """Every split into as many parts that the minor axes need only be gathered from to come to the goal."""
    d = next((d for d, n in enumerate(_lengths(goal, sizes)) if n != lengths[d]), None)
    if d is None:
        yield goal
        return
    for a in others:
        more = (*goal[d], a)
        if lengths[d] % num_parts(more, sizes) == 0:
            yield from _filled(_with(goal, d, more), lengths, [b for b in others if b != a], sizes)


def _lengths(split: Split, sizes: Mapping[str, int]) -> list[int]:
    return [num_parts(axes, sizes) for axes in split]


def _with(split: Split, dim: int, axes: tuple[Axis, ...]) -> Split:
    return (*split[:dim], axes, *split[dim + 1 :])


def _cut(split: Split, pieces: Mapping[str, list[int]], sizes: Mapping[str, int]) -> Split:
    """The same split in axes and pieces of them that are the same or have nothing in common."""

    def cut(axis: Axis) -> Iterator[Axis]:
        name, first, size = _part(axis, sizes)
        if name not in pieces:
            yield axis
            return
        ends = itertools.pairwise(pieces[name])
        found = [(name, pre, end // pre) for pre, end in ends if first <= pre < first * size]
        yield from found if len(pieces[name]) > 2 else [name]

    return tuple(tuple(piece for axis in axes for piece in cut(axis)) for axes in split)


def _part(axis: Axis, sizes: Mapping[str, int]) -> tuple[str, int, int]:
    return (axis, 1, sizes[axis]) if isinstance(axis, str) else axis
