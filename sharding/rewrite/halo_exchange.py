"""Halo exchange: what neighbouring devices exchange so that an op can slide over a sharded dim.

Windows that begin on one shard and end on the next need its first rows: the halo. Each device receives its halo by a
collective-permute from the left and one from the right, or several if it reaches beyond the next shard (GSPMD, Xu et
al. 2021, section 3.3). In a rotation, the first and last device are neighbours too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .. import compat
from ..graph import Op
from ..spec import Axis, Spec, num_parts

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """The halo exchange along one dim of an op's first operand."""

    dim: int
    axes: tuple[Axis, ...]
    """The axes that the dim is sharded over."""
    shares: tuple[Fraction, ...]
    """What each device receives by each collective-permute, as a fraction of its shard of the operand."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Row i of a result's dim depends on rows i x step + first to i x step + last of the operand's dim."""

    dim: int
    result_dim: int
    step: int
    first: int
    last: int
    dilation: int = 1
    """Of the operand: gaps between its rows count, too."""


def halos(op: Op, shapes: Sequence[Sequence[int]], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Iterator[Halo]:
    """Yields the halo exchanges of an op, dim by dim.

    Args:
        op: any op.
        shapes: the global shapes of its operands, then of its results.
        specs: their specs while it runs.
        sizes: the mesh axis sizes.
    """
    n, grown = len(op.operands), Fraction(1)
    for one in WINDOWS[op.name](op.site[0].params, shapes) if op.name in WINDOWS else ():
        axes = specs[0].dims[one.dim].axes
        if axes and axes == specs[n].dims[one.result_dim].axes:
            parts = num_parts(axes, sizes)
            pieces = _exchanged(one, shapes[0][one.dim], shapes[n][one.result_dim], parts) or ()
            shares = [Fraction(piece, -(-shapes[0][one.dim] // parts)) for piece in pieces]
            if shares:
                yield Halo(dim=one.dim, axes=axes, shares=tuple(grown * share for share in shares))
            grown += grown * sum(shares)  # the halo makes the rows of the next dim longer
    for dim in op.site[0].params["dimensions"] if op.name == "rev" else ():
        if axes := specs[0].dims[dim].axes:
            yield Halo(dim=dim, axes=axes, shares=(Fraction(1),))


def _exchanged(window: _Window, length: int, result_length: int, parts: int) -> list[int] | None:
    """The rows that each device receives by each collective-permute along one dim; None if XLA gathers the dim instead.

    After `ExchangeHaloAndGetValidData` of openxla/xla, which takes no notice of where an uneven dim ends.
    """
    if not length or not result_length:
        return []
    rows, result_rows = -(-length // parts), -(-result_length // parts)
    receivers = min(parts, result_length)  # the other devices have no row of the result
    first = [(k * result_rows * window.step + window.first) for k in range(parts)]
    size = (result_rows - 1) * window.step + window.last - window.first + 1
    gap = window.dilation
    needed = [((low + gap - 1) // gap, (low + size + gap - 1) // gap) for low in first]
    before = [k * rows - low for k, (low, _) in enumerate(needed)]
    after = [high - (k + 1) * rows for k, (_, high) in enumerate(needed)]
    if gap == 1 and max(*before[:receivers], *after[:receivers]) > 2 * size:
        if 2 * size >= parts * rows:
            return None
        return list(_far_pieces(needed[:receivers], length, rows))
    left, right = max(before[1:receivers], default=0), max(after[: min(receivers, parts - 1)])
    if left + right + rows >= rows * parts and max(left, right) > rows:
        return None
    begin, end = -max(before), rows + max(after)
    if begin >= end:
        return None
    pieces = []
    for i in reversed(range(-(-left // rows))):
        if (-i - 1) * rows < end:
            pieces.append(min(left - rows * i, rows) - max(-i * rows - end, 0))
    for i in range(min(max(begin - rows, 0), max(right, 0)) // rows, -(-right // rows)):
        pieces.append(min(right - rows * i, rows) - max(begin - (i + 1) * rows, 0))
    return pieces


def realignments(have: Spec, want: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> Iterator[Halo]:
    """Yields what devices exchange before the minor axes of a dim with uneven shards are gathered.

    The shards of a group of devices then end where its gathered shard ends (`TileToPartialReplicateHaloExchange`).
    """
    for dim, (length, old, new) in enumerate(zip(shape, have.axes, want.axes, strict=True)):
        parts, kept = num_parts(old, sizes), num_parts(new, sizes)
        rows, factor = -(-length // parts), parts // kept
        excess = rows * factor - -(-length // kept)
        if new and old[: len(new)] == new and excess > 0:
            first = [k * rows - excess * (k // factor) for k in range(parts)]
            pieces = _far_pieces([(low, low + rows) for low in first], length, rows)
            yield Halo(dim=dim, axes=old, shares=tuple(Fraction(piece, rows) for piece in pieces))


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


def _convolution(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[_Window]:
    numbers = params["dimension_numbers"]
    dims = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    keys = ("window_strides", "padding", "rhs_dilation", "lhs_dilation")
    for (dim, kernel, result_dim), step, (low, _), spacing, gap in zip(
        dims, *(params[key] for key in keys), strict=True
    ):
        yield _Window(dim, result_dim, step, -low, (shapes[1][kernel] - 1) * spacing - low, gap)


def _pooling(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[_Window]:
    del shapes
    lengths, steps, padding = params["window_dimensions"], params["window_strides"], params["padding"]
    dilation = params.get("window_dilation") or (1,) * len(lengths)
    gaps = params.get("base_dilation") or (1,) * len(lengths)
    for d, (length, step, (low, _), spacing, gap) in enumerate(
        zip(lengths, steps, padding, dilation, gaps, strict=True)
    ):
        yield _Window(d, d, step, -low, (length - 1) * spacing - low, gap)


def _slice(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[_Window]:
    del shapes
    steps = params["strides"] or (1,) * len(params["start_indices"])
    yield from (
        _Window(d, d, step, start, start)
        for d, (start, step) in enumerate(zip(params["start_indices"], steps, strict=True))
    )


def _pad(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[_Window]:
    del shapes
    yield from (_Window(d, d, 1, -low, -low, gap + 1) for d, (low, _, gap) in enumerate(params["padding_config"]))


WINDOWS: dict[str, Callable[[Params, Sequence[Sequence[int]]], Iterator[_Window]]] = {
    "conv_general_dilated": _convolution,
    "pad": _pad,
    "slice": _slice,
    **dict.fromkeys(("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"), _pooling),
}
"""Primitive -> the window of each dim that it slides over; the other dims are sharded identically."""


def rotation(op: Op, makers: Mapping[int, Op]) -> int | None:
    """Returns the shift of a concatenation that rotates an array, whose two slices are its operands; else None."""
    parts = [makers.get(v) for v in op.operands] if op.name == "concatenate" else []
    if len(parts) != 2 or None in parts:
        return None
    last, first = parts
    assert last is not None and first is not None
    if last.name != "slice" or first.name != "slice" or last.operands != first.operands:
        return None
    d, (p, q) = op.site[0].params["dimension"], (part.site[0].params for part in (last, first))
    starts, ends = p["start_indices"], q["limit_indices"]
    others = [k for k in range(len(starts)) if k != d]
    same = all(p[key][k] == q[key][k] for key in ("start_indices", "limit_indices") for k in others)
    steps = {*(p["strides"] or ()), *(q["strides"] or ())}
    if not same or steps - {1} or q["start_indices"][d] or ends[d] != starts[d]:
        return None
    return (p["limit_indices"][d] - starts[d]) % p["limit_indices"][d]


def rotation_gradient(op: Op, makers: Mapping[int, Op]) -> tuple[int, int] | None:
    """Returns (dim, shift) of a sum that rotates an array, whose two parts are its padded operands; else None.

    The gradient of a rotation is such a sum.
    """
    pads = [makers[v] for v in op.operands if v in makers] if op.name in ("add", "add_any") else []
    if len(pads) != 2 or any(pad.name != "pad" or not _is_zero(pad.site[0].invars[1]) for pad in pads):
        return None
    cuts = [makers.get(pad.operands[0]) for pad in pads]
    if (
        any(cut is None or cut.name not in ("slice", "split") for cut in cuts)
        or len({_source(c) for c in cuts if c}) > 1
    ):
        return None
    first, last = ([tuple(map(int, widths)) for widths in pad.site[0].params["padding_config"]] for pad in pads)
    rotated = [d for d, pair in enumerate(zip(first, last, strict=True)) if pair != ((0, 0, 0), (0, 0, 0))]
    if len(rotated) != 1:
        return None
    (d,) = rotated
    (low, high, inside), (other_low, other_high, other_inside) = first[d], last[d]
    length = op.site[0].outvars[0].aval.shape[d]
    one_sided = not inside and not other_inside and low * high == other_low * other_high == 0
    fit = one_sided and low + high + other_low + other_high == length and bool(low) != bool(other_low)
    return (d, max(low, other_low)) if fit else None


def _is_zero(atom: Any) -> bool:
    return compat.is_literal(atom) and not atom.val


def _source(op: Op) -> int:
    return op.operands[0]


def rotation_parts(op: Op, makers: Mapping[int, Op]) -> Iterator[Op]:
    """Yields the ops inside a rotation; XLA recognises the rotation if their results are unconstrained."""
    if rotation(op, makers) is not None:
        yield from (makers[v] for v in op.operands)
    elif rotation_gradient(op, makers) is not None:
        for pad in (makers[v] for v in op.operands):
            yield from (pad, makers[pad.operands[0]])
