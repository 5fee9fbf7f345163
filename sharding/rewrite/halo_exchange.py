"""Halo exchange: what neighbouring devices exchange so that an op can slide over a sharded dim.

Windows that begin on one shard and end on the next need its first rows: the halo. Each device receives its halo by a
collective-permute from the left and one from the right, or several if it reaches beyond the next shard (GSPMD, Xu et
al. 2021, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..graph import Op
from ..propagation.axis_atoms import AtomTable
from ..spec import Axis, Spec, local_shape, num_parts
from .sliding_windows import WINDOWS, Window

EXCHANGING = WINDOWS.keys() | {"rev"}
"""Primitives that may exchange halos."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """The halo exchange along one dim of an op's first operand."""

    dim: int
    axes: tuple[Axis, ...]
    """The axes that the dim is sharded over."""
    shares: tuple[Fraction, ...]
    """What each device receives by each collective-permute, as a fraction of its shard of the operand."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The halo exchange of one dim, in rows."""

    pieces: tuple[int, ...]
    """What each device receives by each collective-permute."""
    before: int
    """Of a shard that are exchanged."""
    after: int
    """Of a shard with its halo."""


def halos(op: Op, shapes: Sequence[Sequence[int]], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Iterator[Halo]:
    """Yields the halo exchanges of an op, dim by dim.

    Args:
        op: any op.
        shapes: the global shapes of its operands, then of its results.
        specs: their specs while it runs.
        sizes: the mesh axis sizes.
    """
    n, found = len(op.operands), dict[int, _Exchange]()
    if 0 in shapes[0]:
        return
    for one in WINDOWS[op.name](op.site[0].params, shapes) if op.name in WINDOWS else ():
        axes = specs[0].dims[one.dim].axes
        if axes and axes == specs[n].dims[one.result_dim].axes:
            exchange = _exchanged(one, shapes[0][one.dim], num_parts(axes, sizes))
            if exchange is not None:
                found[one.dim] = exchange
    lengths = local_shape(specs[0].axes, shapes[0], sizes)
    rows = {dim: exchange.before for dim, exchange in found.items()}
    for dim, exchange in sorted(found.items()):  # the halo makes the rows of the next dim longer
        others = math.prod(Fraction(length, lengths[d]) for d, length in rows.items() if d != dim)
        shares = tuple(others * Fraction(piece, lengths[dim]) for piece in exchange.pieces)
        rows[dim] = exchange.after
        if shares:
            yield Halo(dim=dim, axes=specs[0].dims[dim].axes, shares=shares)
    if op.name == "rev":
        yield from _reversed(op.site[0].params["dimensions"], shapes[0], specs[0], sizes)


def _reversed(dims: Sequence[int], shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> Iterator[Halo]:
    """Yields the exchange of all shards along reversed dims, and those that move padding of uneven ones in front."""
    sharded = [dim for dim in dims if spec.dims[dim].axes]
    if sharded:
        axes = tuple(axis for dim in sharded for axis in spec.dims[dim].axes)
        yield Halo(dim=sharded[0], axes=axes, shares=(Fraction(1),))
    for dim in sharded:
        parts = num_parts(spec.dims[dim].axes, sizes)
        window = Window(dim=dim, result_dim=dim, low=-shape[dim] % parts)
        exchange = _exchanged(window, shape[dim], parts)
        if exchange is not None and exchange.pieces:
            rows = -(-shape[dim] // parts)
            shares = tuple(Fraction(piece, rows) for piece in exchange.pieces)
            yield Halo(dim=dim, axes=spec.dims[dim].axes, shares=shares)


def is_gathered(window: Window, length: int, parts: int) -> bool:
    """Whether XLA gathers a sharded dim instead of exchanging halos, as they are too large.

    Args:
        window: that slides over the dim.
        length: rows of the dim.
        parts: shards of the dim.
    """
    return _exchanged(window, length, parts) is None


def _exchanged(window: Window, length: int, parts: int) -> _Exchange | None:
    """The exchange along one dim; None if XLA gathers the dim instead.

    After `ReshardAsWindowedInput` of openxla/xla: where the result has fewer rows than there are devices, devices that
    hold nothing useful take no part.
    """
    rows, gap = -(-length // parts), window.gap
    span = 1 + (window.size - 1) * window.spacing
    full = 1 + (length - 1) * gap + window.low + window.high
    count = (full - span) // window.step + 1
    if window.is_trivial or count <= 0:
        return _Exchange((), rows, rows)
    left = window.low // gap if window.low >= 0 else -(-window.low // gap)
    offset, result_rows = gap - 1 - (window.low - left * gap), -(-count // parts)
    if count < parts and window.spacing == gap == 1:
        useful = -(-(length + window.high) // rows)
        if useful < parts:
            parts = max(useful, count)
            if window.high < 0 and length + window.high < rows:
                rows = length + window.high
            length = rows * parts
        empty = max(-left, 0) // rows - count
        if parts > 1 and empty > 0:
            parts, left = parts - empty, left + empty * rows
            skipped = max(-left - rows * (parts - 1), 0)
            rows, left = rows - skipped, left + skipped * parts
            if skipped and full < rows:
                rows, left = full, left + (rows - full) * (parts - 1)
            length = rows * parts
    if parts == 1:
        return _Exchange((), rows, rows)
    if (window.step * result_rows) % gap and window.step > 1:
        return None
    size = window.step * (result_rows - 1) + span
    starts = [(window.step * result_rows * k + offset) // gap for k in range(parts)]
    ends = [(window.step * result_rows * k + size + offset) // gap for k in range(parts)]
    needed = [(start - left, end - left) for start, end in zip(starts, ends, strict=True)]
    pieces = _pieces(needed, length, rows, starts_at_padding=starts[0] == 0)
    return None if pieces is None else _Exchange(tuple(pieces), rows, max(end - first for first, end in needed))


def _pieces(needed: Sequence[tuple[int, int]], length: int, rows: int, *, starts_at_padding: bool) -> list[int] | None:
    """The rows of each collective-permute; None if XLA gathers the dim instead (`ExchangeHaloAndGetValidData`).

    Args:
        needed: the first row that each device needs, and the one behind its last.
        length: rows of the dim.
        rows: of a shard.
        starts_at_padding: whether the first device needs all of the padding.
    """
    parts, size = len(needed), max(end - first for first, end in needed)
    before = [k * rows - first for k, (first, _) in enumerate(needed)]
    after = [end - (k + 1) * rows for k, (_, end) in enumerate(needed)]
    if starts_at_padding and max(*before, *after) > 2 * size:
        return None if 2 * size >= parts * rows else list(_far_pieces(needed, length, rows))
    left, right = max(before[1:]), max(after[:-1])
    if left + right + rows >= rows * parts and max(left, right) > rows:
        return None
    begin, end = -max(before), rows + max(after)
    if begin >= end:
        return None
    pieces = []
    for i in reversed(range(min(-(-left // rows), parts - 1))):
        if (-i - 1) * rows < end:
            pieces.append(min(left - rows * i, rows) - max(-i * rows - end, 0))
    for i in range(min(max(begin - rows, 0), max(right, 0)) // rows, min(-(-right // rows), parts - 1)):
        pieces.append(min(right - rows * i, rows) - max(begin - (i + 1) * rows, 0))
    return pieces


def realignments(have: Spec, want: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> Iterator[Halo]:
    """Yields what devices exchange before a dim is sharded over fewer or more axes, where shards are uneven.

    The shards of a group of devices must begin where the shard of all of them begins
    (`TileToPartialReplicateHaloExchange` and `PadFromPartialReplicateShape` of openxla/xla).
    """
    table = AtomTable.of(sizes)
    for dim, (length, *axes) in enumerate(zip(shape, have.axes, want.axes, strict=True)):
        old, new = map(table.atoms_of, axes)
        parts, others = (num_parts(one, sizes) for one in axes)
        rows, target = -(-length // parts), -(-length // others)
        if not length:
            continue
        needed: list[tuple[int, int]] = []
        if new and old[: len(new)] == new and rows * (factor := parts // others) > target:
            first = [k * rows - (rows * factor - target) * (k // factor) for k in range(parts)]
            needed = [(low, low + rows) for low in first]
        elif old and new[: len(old)] == old and (wide := target * (others // parts)) > rows:
            needed = [(k * wide, (k + 1) * wide) for k in range(parts)]
        shares = tuple(Fraction(piece, rows) for piece in _far_pieces(needed, length, rows))
        if shares:
            yield Halo(dim=dim, axes=axes[0], shares=shares)


def _far_pieces(needed: Sequence[tuple[int, int]], length: int, rows: int) -> Iterator[int]:
    """Yields the rows of each permute where shards need little from far away (XLA's `ExchangeHaloCompact`).

    Args:
        needed: the first row that each device needs, and the one behind its last.
        length: rows of the dim.
        rows: of a shard.
    """
    num_sources = -(-length // rows)
    waiting: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_sources)]  # offset, device, first, end
    for k, (first, end) in enumerate(needed):
        at = max(first, 0)
        while at < min(end, length):
            source, start = divmod(at, rows)
            stop = min(rows, start + end - at)
            if source != k:
                waiting[source].append((at - first, k, start, stop))
            at += stop - start
    for one in waiting:
        one.sort(key=lambda halo: halo[0])
    while any(waiting):
        receivers, begin, end = set[int](), rows, 0
        for one in waiting:
            if not one:
                continue
            _, receiver, start, stop = one[0]
            from_both_ends = (begin > stop and end == rows and start == 0) or (
                end < start and begin == 0 and stop == rows
            )
            if receivers and (receiver in receivers or from_both_ends):
                continue
            receivers.add(receiver)
            begin, end = min(begin, start), max(end, stop)
            one.pop(0)
        yield end - begin
