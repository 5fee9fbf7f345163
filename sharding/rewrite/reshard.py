"""Resharding: the cheapest chain of steps from one spec of an array to another, each of which XLA runs as it is.

A step changes a spec by at most one collective:

    slice                 dims are sharded over unused axes: each device keeps its shard
    all-gather            the minor axes of a dim are gathered
    all-reduce            the same, of a dim with fewer elements than half of the devices
    all-to-all            the minor axes of one dim become the minor axes of another
    collective-permute    shards keep their sizes, devices exchange them

XLA may implement an arbitrary reshard by gathering the full array ("involuntary full rematerialization"), or abort in a
failed check. A single step of these is compiled to its collective, on every release (`tests/rewrite/test_reshard.py`).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import os.path
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..cost import Kind, wire_bytes
from ..propagation.axis_atoms import AtomTable
from ..spec import Axis, Dim, MeshSizes, Spec, axis_size, byte_cost, cuts, local_shape, num_parts

DimAxes = tuple[tuple[Axis, ...], ...]
"""The axes of each dim, major to minor."""

_Move = tuple[Kind | Literal["slice"], tuple[Axis, ...], DimAxes]
"""The kind of a step, the axes of its device groups, the dims' axes after it."""

STEP_BYTES = 2**8
"""Minimum cost of a step, so that of chains with equal bytes sent the shorter is chosen."""
MAX_PIECES = 4
"""Most axes and sub-axes in a search through sub-axes: the number of their specs grows faster than factorially."""
MAX_MOVES = 50_000
"""Most moves that a search looks at; the cheapest chain that it has found by then is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a reshard."""

    kind: Kind | Literal["slice"]
    axes: tuple[Axis, ...]
    """The mesh axes of its device groups; for a slice, the added axes."""
    spec: Spec
    """The spec of the array after it."""
    num_bytes: int
    """Bytes per device after the step; for a reduce-scatter, before it."""
    wire_bytes: int
    """Bytes that each device sends."""
    byte_cost: float = 1.0
    """What a byte costs over the links of its axes, relative to the fastest of the mesh."""
    is_sum: bool = False
    """Whether it adds up partial sums; other all-reduces replicate a short dim."""

    @property
    def dims(self) -> list[int]:
        """The dims that are sharded over its axes after it."""
        return [d for d, dim in enumerate(self.spec.axes) if not set(self.axes).isdisjoint(dim)]


def chain(
    have: Spec,
    want: Spec,
    shape: tuple[int, ...],
    itemsize: int,
    sizes: Mapping[str, int],
    *,
    permutes: bool = True,
) -> tuple[Step, ...]:
    """Returns the cheapest steps from one spec of an array to another; none if they are equal.

    Args:
        have: the current spec.
        want: the target spec.
        shape: the global shape.
        itemsize: bytes of an element.
        sizes: the mesh axis sizes.
        permutes: whether collective-permutes are allowed. Not if only some devices run the program: a permute waits
            for all devices, other collectives for their own group. No sub-axes are used then either.

    The cost is the bytes that a device sends, weighed by the links of the axes, plus `STEP_BYTES` per step (A* over
    the specs on the way; every device must at least be sent what its last shard holds and its first one does not).
    """
    pieces = cuts(itertools.chain.from_iterable((*have.axes, *want.axes)), sizes)
    start, goal = _refined(have.axes, pieces, sizes), _refined(want.axes, pieces, sizes)
    if start == goal:
        return ()
    costs = tuple(sizes.byte_costs.items()) if isinstance(sizes, MeshSizes) else ()
    named = tuple(sizes.items())
    steps = _chain(start, goal, shape, itemsize, named, costs, permutes)[0]
    if not permutes:
        is_even = _is_even((start, *(step.spec.axes for step in steps)), shape, sizes)
        return steps if is_even else _gather_then_slice(start, goal, shape, itemsize, sizes)
    pieces = _sub_axis_boundaries(start, goal, sizes)
    if not pieces or sum(step.num_bytes for step in steps if step.kind != "slice") <= steps[-1].num_bytes:
        return steps
    start, goal = _refined(start, pieces, sizes), _refined(goal, pieces, sizes)
    return min(steps, _chain(start, goal, shape, itemsize, named, costs, permutes)[0], key=chain_cost)


def _is_even(specs: Sequence[DimAxes], shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    """Whether the axes divide each dim that changes, in every spec."""
    changing = [(n, seen) for n, seen in zip(shape, zip(*specs, strict=True), strict=True) if len({*seen}) > 1]
    return not any(n % num_parts(axes, sizes) for n, seen in changing for axes in seen)


def _gather_then_slice(
    start: DimAxes, goal: DimAxes, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]
) -> tuple[Step, ...]:
    """Returns the steps that all-gather each dim that changes, then slice it.

    With uneven shards, the shard boundaries of different specs do not align, and XLA would exchange halos.
    """
    changed = [d for d, (old, new) in enumerate(zip(start, goal, strict=True)) if old != new]
    gathers: list[_Move] = []
    slices: list[_Move] = []
    at = start
    for d in changed:
        at = _with(at, d, ())
        if start[d]:
            gathers.append(("all-gather", start[d], at))
    for d in changed:
        at = _with(at, d, goal[d])
        if goal[d]:
            slices.append(("slice", goal[d], at))
    befores = (start, *(after for _, _, after in (*gathers, *slices)))
    pairs = zip(befores, (*gathers, *slices), strict=False)
    run = [(before, _as_run(before, move, shape, sizes)) for before, move in pairs]
    return _joined(_step(move, _bytes_after(before, move, shape, itemsize, sizes), sizes) for before, move in run)


def chain_cost(steps: Iterable[Step]) -> float:
    """The bytes that a device sends, weighed by their links, plus `STEP_BYTES` per collective."""
    return sum(step.wire_bytes * step.byte_cost + (STEP_BYTES if step.kind != "slice" else 0) for step in steps)


def _sub_axis_boundaries(start: DimAxes, goal: DimAxes, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Returns where to divide the axes that move, so that a sub-axis of a larger one can replace a smaller one.

    Empty if there is nothing to gain, or more pieces than can be searched.
    """
    pieces, count = _shorter_parts(start, goal, sizes)
    return cuts(pieces, sizes) if 0 < count <= MAX_PIECES else {}


def _shorter_parts(start: DimAxes, goal: DimAxes, sizes: Mapping[str, int]) -> tuple[list[Axis], int]:
    """The axes that move and their parts of other axes' sizes, and their number; none if there are no such parts."""
    moving = dict.fromkeys(a for x, y in zip(start, goal, strict=True) if x != y for a in (*x, *y))
    lengths = {axis_size(a, sizes) for a in moving}
    parts = [_part(a, sizes) for a in moving]
    shorter = [(name, pre, n) for name, pre, size in parts for n in lengths if n < size and size % n == 0]
    return ([*parts, *shorter], len(parts) + len(shorter)) if shorter else ([], 0)


def is_cut_short(have: Spec, want: Spec, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]) -> bool:
    """Whether `chain` left out chains, of which there are too many."""
    if have.axes == want.axes:
        return False
    pieces = cuts(itertools.chain.from_iterable((*have.axes, *want.axes)), sizes)
    start, goal = _refined(have.axes, pieces, sizes), _refined(want.axes, pieces, sizes)
    costs = tuple(sizes.byte_costs.items()) if isinstance(sizes, MeshSizes) else ()
    is_complete = _chain(start, goal, shape, itemsize, tuple(sizes.items()), costs, True)[1]
    return not is_complete or _shorter_parts(start, goal, sizes)[1] > MAX_PIECES


@lru_cache(maxsize=4096)
def _chain(
    start: DimAxes,
    goal: DimAxes,
    shape: tuple[int, ...],
    itemsize: int,
    named: tuple[tuple[str, int], ...],
    costs: tuple[tuple[str, float], ...],
    permutes: bool,
) -> tuple[tuple[Step, ...], bool]:
    """The cheapest steps that were found, and whether there are none cheaper."""
    sizes = MeshSizes(dict(named), dict(costs))
    for is_hasty in (False, True):
        arrived_by, is_complete = _search(start, goal, shape, itemsize, sizes, permutes, is_hasty)
        if goal in arrived_by:
            break
    else:
        return _gather_then_slice(start, goal, shape, itemsize, sizes), False
    steps: list[Step] = []
    while goal != start:
        goal, move = arrived_by[goal]
        steps.append(_step(move, _bytes_after(goal, move, shape, itemsize, sizes), sizes))
    return _joined(reversed(steps)), is_complete


def _search(
    start: DimAxes,
    goal: DimAxes,
    shape: tuple[int, ...],
    itemsize: int,
    sizes: Mapping[str, int],
    permutes: bool,
    is_hasty: bool,
) -> tuple[dict[DimAxes, tuple[DimAxes, _Move]], bool]:
    """Returns the spec and the move by which each spec is reached, and whether there is no cheaper way to the goal.

    A hasty search finds some way: it goes on where the most axes are in place.
    """
    axis_cost = local_bytes(goal, shape, itemsize, sizes)
    number = itertools.count()  # the first found of equal costs
    waiting: list[tuple[float, int, float, DimAxes]] = [(0, next(number), 0, start)]
    best: dict[DimAxes, float] = {start: 0}
    arrived_by: dict[DimAxes, tuple[DimAxes, _Move]] = {}
    num_moves = 0
    while waiting and num_moves < MAX_MOVES:
        _, _, spent, at = heapq.heappop(waiting)
        if at == goal:
            return arrived_by, not is_hasty
        if spent > best[at]:
            continue
        for asked in _moves(at, goal, sizes):
            num_moves += 1
            kind, axes, after = move = _as_run(at, asked, shape, sizes)
            cost = spent
            if kind == "collective-permute" and not permutes:
                continue
            if kind == "all-to-all" and _is_gathered(at, after, shape, sizes):
                continue
            if kind != "slice":
                num_bytes = _bytes_after(at, move, shape, itemsize, sizes)
                sent = wire_bytes(kind, num_bytes, num_parts(axes, sizes))
                cost += sent * byte_cost(axes, sizes) + STEP_BYTES
            if after in best and cost >= best[after]:
                continue
            least = _least_cost(after, goal, shape, itemsize, sizes)
            if cost + least < best.get(goal, math.inf):
                best[after], arrived_by[after] = cost, (at, move)
                if is_hasty:
                    least += axis_cost * _num_misplaced(after, goal)
                heapq.heappush(waiting, (cost + least, next(number), cost, after))
    return arrived_by, False


def _least_cost(at: DimAxes, goal: DimAxes, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]) -> float:
    """A lower bound of what is to be paid yet: some device must be sent what it lacks of its shard."""
    held = itemsize
    for n, have, want in zip(local_shape(_longer(at, goal), shape, sizes), at, goal, strict=True):
        held *= n if have[: len(want)] == want[: len(have)] else 0
    lacking = local_bytes(goal, shape, itemsize, sizes) - held
    return lacking + STEP_BYTES if lacking else 0


def _num_misplaced(at: DimAxes, goal: DimAxes) -> int:
    """The number of axes that are to be added or removed."""
    pairs = zip(at, goal, strict=True)
    return sum(len(have) + len(want) - 2 * len(os.path.commonprefix([have, want])) for have, want in pairs)


def _longer(at: DimAxes, goal: DimAxes) -> DimAxes:
    return tuple(max(have, want, key=len) for have, want in zip(at, goal, strict=True))


def _joined(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Returns the steps with one slice in place of several in a row.

    Compilers make a reduce-scatter of a sum and the slice right behind it, not of a sum and two.
    """
    found: list[Step] = []
    for step in steps:
        if found and found[-1].kind == step.kind == "slice":
            found[-1] = dataclasses.replace(step, axes=(*found[-1].axes, *step.axes))
        else:
            found.append(step)
    return tuple(found)


def _as_run(before: DimAxes, move: _Move, shape: tuple[int, ...], sizes: Mapping[str, int]) -> _Move:
    """Returns the move as XLA runs it: it all-reduces dims of which most devices have nothing (`ReplicatePartial`)."""
    kind, axes, after = move
    if kind != "all-gather":
        return move
    pairs = zip(before, after, local_shape(after, shape, sizes), strict=True)
    is_short = any(old != new and length <= num_parts(axes, sizes) // 2 for old, new, length in pairs)
    return ("all-reduce", axes, after) if is_short else move


def _is_gathered(before: DimAxes, after: DimAxes, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    """Whether XLA would gather all of an array in place of an all-to-all: shards of a dim that stays sharded don't fit.

    A dim that gives up some of its axes must be even; shards of a dim that gets more must be parts of those before.
    """

    def fits(old: tuple[Axis, ...], new: tuple[Axis, ...], n: int) -> bool:
        parts, others = num_parts(old, sizes), num_parts(new, sizes)
        if not old or not new or parts == others:
            return True
        return not n % parts if others < parts else -(-n // parts) == -(-n // others) * (others // parts)

    return not all(map(fits, before, after, shape))


def _bytes_after(before: DimAxes, move: _Move, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]) -> int:
    """Returns the bytes per device after a step; all-gathers and all-to-alls include the padding of uneven shards."""
    kind, axes, after = move
    if kind == "all-gather":
        return local_bytes(before, shape, itemsize, sizes) * num_parts(axes, sizes)
    if kind == "all-to-all":
        pairs = zip(local_shape(before, shape, sizes), local_shape(after, shape, sizes), before, after, strict=True)
        grows = [old * num_parts(axes, sizes) if len(b) > len(a) else new for old, new, b, a in pairs]
        return itemsize * math.prod(grows)
    return local_bytes(after, shape, itemsize, sizes)


def _step(move: _Move, num_bytes: int, sizes: Mapping[str, int]) -> Step:
    kind, axes, after = move
    sent = 0 if kind == "slice" else wire_bytes(kind, num_bytes, num_parts(axes, sizes))
    table = AtomTable.of(sizes)
    spec = Spec(dims=tuple(Dim(axes=table.axes_of(table.atoms_of(dim))) for dim in after))
    return Step(
        kind=kind,
        axes=table.axes_of(table.atoms_of(axes)),
        spec=spec,
        num_bytes=num_bytes,
        wire_bytes=sent,
        byte_cost=byte_cost(axes, sizes),
    )


def local_bytes(axes: DimAxes, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of an array's shard on one device."""
    return itemsize * math.prod(local_shape(axes, shape, sizes))


def _moves(at: DimAxes, goal: DimAxes, sizes: Mapping[str, int]) -> Iterator[_Move]:
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
                yield "slice", (a,), _with(at, d, (*axes, a))
        for k in range(1, len(axes) + 1):
            kept, moved = axes[:-k], axes[-k:]
            yield "all-gather", moved, _with(at, d, kept)
            for e in range(len(at)):
                if e != d:
                    yield "all-to-all", moved, _with(_with(at, d, kept), e, (*at[e], *moved))
        for other in _orders(axes, goal, d):
            if other != axes:
                yield "collective-permute", axes, _with(at, d, other)
    for after in _extended_goals(goal, shards, [a for a in used if not any(a in axes for axes in goal)], sizes):
        changed = dict.fromkeys(a for x, y in zip(at, after, strict=True) if x != y for a in (*x, *y))
        if changed:
            yield "collective-permute", tuple(changed), after


def _orders(axes: tuple[Axis, ...], goal: DimAxes, dim: int) -> Iterable[tuple[Axis, ...]]:
    """The orders of a dim's axes; of many, those with the ones that stay in front, or that go to one dim behind."""
    if len(axes) <= MAX_PIECES:
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
            yield from _extended_goals(_with(goal, d, more), shards, [b for b in others if b != a], sizes)


def _num_shards(dims: DimAxes, sizes: Mapping[str, int]) -> list[int]:
    return [num_parts(axes, sizes) for axes in dims]


def _with(dims: DimAxes, dim: int, axes: tuple[Axis, ...]) -> DimAxes:
    return (*dims[:dim], axes, *dims[dim + 1 :])


def _refined(dims: DimAxes, pieces: Mapping[str, list[int]], sizes: Mapping[str, int]) -> DimAxes:
    """Returns the same axes, divided into sub-axes that are equal or disjoint."""

    def divided(axis: Axis) -> Iterator[Axis]:
        name, first, size = _part(axis, sizes)
        if name not in pieces:
            yield axis
            return
        ends = itertools.pairwise(pieces[name])
        found = [(name, pre, end // pre) for pre, end in ends if first <= pre < first * size]
        yield from found if len(pieces[name]) > 2 else [name]

    return tuple(tuple(piece for axis in axes for piece in divided(axis)) for axes in dims)


def _part(axis: Axis, sizes: Mapping[str, int]) -> tuple[str, int, int]:
    return (axis, 1, sizes[axis]) if isinstance(axis, str) else axis
