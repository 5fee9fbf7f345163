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
from ..spec import Axis, Dim, MeshSizes, Spec, axis_size, byte_cost, cuts, local_bytes, local_shape, num_parts
from .reshard_moves import DimAxes, Move, as_run, bytes_after, is_gathered, moves, with_dim

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
    start, goal = _ends(have, want, sizes)
    if start == goal:
        return ()
    links = _links(sizes)
    steps = _chain(start, goal, shape, itemsize, *links, permutes)[0]
    if not permutes:
        is_even = _is_even((start, *(step.spec.axes for step in steps)), shape, sizes)
        return steps if is_even else _gather_then_slice(start, goal, shape, itemsize, sizes)
    pieces = _sub_axis_boundaries(start, goal, sizes)
    if not pieces or sum(step.num_bytes for step in steps if step.kind != "slice") <= steps[-1].num_bytes:
        return steps
    start, goal = _refined(start, pieces, sizes), _refined(goal, pieces, sizes)
    return min(steps, _chain(start, goal, shape, itemsize, *links, permutes)[0], key=chain_cost)


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
    gathers: list[Move] = []
    slices: list[Move] = []
    at = start
    for d in changed:
        at = with_dim(at, d, ())
        if start[d]:
            gathers.append(("all-gather", start[d], at))
    for d in changed:
        at = with_dim(at, d, goal[d])
        if goal[d]:
            slices.append(("slice", goal[d], at))
    befores = (start, *(after for _, _, after in (*gathers, *slices)))
    pairs = zip(befores, (*gathers, *slices), strict=False)
    run = [(before, as_run(before, move, shape, sizes)) for before, move in pairs]
    return _joined(_step(move, bytes_after(before, move, shape, itemsize, sizes), sizes) for before, move in run)


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
    start, goal = _ends(have, want, sizes)
    if start == goal:
        return False
    is_complete = _chain(start, goal, shape, itemsize, *_links(sizes), True)[1]
    return not is_complete or _shorter_parts(start, goal, sizes)[1] > MAX_PIECES


def _ends(have: Spec, want: Spec, sizes: Mapping[str, int]) -> tuple[DimAxes, DimAxes]:
    """The axes of two specs, divided into sub-axes that are equal or disjoint."""
    pieces = cuts(itertools.chain.from_iterable((*have.axes, *want.axes)), sizes)
    return _refined(have.axes, pieces, sizes), _refined(want.axes, pieces, sizes)


def _links(sizes: Mapping[str, int]) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, float], ...]]:
    """The sizes of the mesh axes and the costs of their links, hashable."""
    return tuple(sizes.items()), tuple(sizes.byte_costs.items()) if isinstance(sizes, MeshSizes) else ()


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
        steps.append(_step(move, bytes_after(goal, move, shape, itemsize, sizes), sizes))
    return _joined(reversed(steps)), is_complete


def _search(
    start: DimAxes,
    goal: DimAxes,
    shape: tuple[int, ...],
    itemsize: int,
    sizes: Mapping[str, int],
    permutes: bool,
    is_hasty: bool,
) -> tuple[dict[DimAxes, tuple[DimAxes, Move]], bool]:
    """Returns the spec and the move by which each spec is reached, and whether there is no cheaper way to the goal.

    A hasty search finds some way: it goes on where the most axes are in place.
    """
    axis_cost = local_bytes(goal, shape, itemsize, sizes)
    number = itertools.count()  # the first found of equal costs
    waiting: list[tuple[float, int, float, DimAxes]] = [(0, next(number), 0, start)]
    best: dict[DimAxes, float] = {start: 0}
    arrived_by: dict[DimAxes, tuple[DimAxes, Move]] = {}
    num_moves = 0
    while waiting and num_moves < MAX_MOVES:
        _, _, spent, at = heapq.heappop(waiting)
        if at == goal:
            return arrived_by, not is_hasty
        if spent > best[at]:
            continue
        for asked in moves(at, goal, sizes):
            num_moves += 1
            kind, axes, after = move = as_run(at, asked, shape, sizes)
            cost = spent
            if kind == "collective-permute" and not permutes:
                continue
            if kind == "all-to-all" and is_gathered(at, after, shape, sizes):
                continue
            if kind != "slice":
                num_bytes = bytes_after(at, move, shape, itemsize, sizes)
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


def _step(move: Move, num_bytes: int, sizes: Mapping[str, int]) -> Step:
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
