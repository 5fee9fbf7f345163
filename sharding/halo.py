"""What devices that are neighbours along a split dim exchange so that an op can slide over it.

Windows that begin on one device's part and end on the next one's need its first rows: the halo. Each device gets those
that it lacks by a collective-permute from the left and one from the right, or several where they lie farther than the
next part (GSPMD, Xu et al. 2021, section 3.3). A rotation is the one case in which the ends meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from . import compat
from .graph import Op
from .spec import Axis, Spec, num_parts

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """What is exchanged along one dim of an op's first operand."""

    dim: int
    axes: tuple[Axis, ...]
    """They split the dim."""
    shares: tuple[Fraction, ...]
    """What each device gets by each collective-permute, in parts of what it has of the operand."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """Row i of a result's dim is made of rows i x step + first to i x step + last of the operand's."""

    dim: int
    result_dim: int
    step: int
    first: int
    last: int


def halos(op: Op, shapes: Sequence[Sequence[int]], splits: Sequence[Spec], sizes: Mapping[str, int]) -> Iterator[Halo]:
    """What an op's devices exchange, dim by dim.

    Args:
        op: any.
        shapes: of its operands, then of its results.
        splits: how these lie while it runs.
        sizes: of the mesh axes.
    """
    n, grown = len(op.operands), Fraction(1)
    for one in REACHES[op.name](op.site[0].params, shapes) if op.name in REACHES else ():
        axes = splits[0].dims[one.dim].axes
        if axes and axes == splits[n].dims[one.result_dim].axes:
            shares = _shares(one, shapes[0][one.dim], shapes[n][one.result_dim], num_parts(axes, sizes))
            if shares:
                yield Halo(dim=one.dim, axes=axes, shares=tuple(grown * share for share in shares))
            grown += grown * sum(shares)  # the next dim's rows are as much longer
    for dim in op.site[0].params["dimensions"] if op.name == "rev" else ():
        if axes := splits[0].dims[dim].axes:
            yield Halo(dim=dim, axes=axes, shares=(Fraction(1),))


def _shares(reach: _Reach, length: int, result_length: int, parts: int) -> list[Fraction]:
    """The collective-permutes along one dim, each as a part of the rows that a device has."""
    if not length:
        return []
    rows, result_rows = -(-length // parts), -(-result_length // parts)
    before = after = 0
    for k in range(parts):
        last = min((k + 1) * result_rows, result_length) - 1
        low = max(0, k * result_rows * reach.step + reach.first)
        high = min(length - 1, last * reach.step + reach.last)
        if k * result_rows <= last and low <= high:
            before, after = max(before, k * rows - low), max(after, high + 1 - (k + 1) * rows)
    return [Fraction(int(piece), rows) for piece in (*_pieces(before, rows), *_pieces(after, rows))]


def _pieces(far: int, rows: int) -> Iterator[int]:
    """So many rows as whole parts and a rest."""
    yield from (rows,) * (far // rows)
    if far % rows:
        yield far % rows


def _convolution(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[_Reach]:
    numbers = params["dimension_numbers"]
    places = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    steps, padding, dilation = params["window_strides"], params["padding"], params["rhs_dilation"]
    for (dim, kernel, result_dim), step, (low, _), apart in zip(places, steps, padding, dilation, strict=True):
        yield _Reach(dim, result_dim, step, -low, (shapes[1][kernel] - 1) * apart - low)


def _window(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[_Reach]:
    del shapes
    lengths, steps, padding = params["window_dimensions"], params["window_strides"], params["padding"]
    apart = params.get("window_dilation") or (1,) * len(lengths)
    for d, (length, step, (low, _), far) in enumerate(zip(lengths, steps, padding, apart, strict=True)):
        yield _Reach(d, d, step, -low, (length - 1) * far - low)


def _slice(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[_Reach]:
    del shapes
    yield from (_Reach(d, d, 1, start, start) for d, start in enumerate(params["start_indices"]))


def _pad(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[_Reach]:
    del shapes
    yield from (_Reach(d, d, 1, -low, -low) for d, (low, _, _) in enumerate(params["padding_config"]))


REACHES: dict[str, Callable[[Params, Sequence[Sequence[int]]], Iterator[_Reach]]] = {
    "conv_general_dilated": _convolution,
    "pad": _pad,
    "slice": _slice,
    **dict.fromkeys(("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"), _window),
}
"""Primitive -> how far its result's rows reach, per dim that it slides over; no other dims are split otherwise."""


def rotation(op: Op, makers: Mapping[int, Op]) -> int | None:
    """By how many places a concatenation turns the array of which its two operands are all the slices; else None."""
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
    alike = all(p[key][k] == q[key][k] for key in ("start_indices", "limit_indices") for k in others)
    steps = {*(p["strides"] or ()), *(q["strides"] or ())}
    if not alike or steps - {1} or q["start_indices"][d] or ends[d] != starts[d]:
        return None
    return (p["limit_indices"][d] - starts[d]) % p["limit_indices"][d]


def rotation_back(op: Op, makers: Mapping[int, Op]) -> tuple[int, int] | None:
    """(dim, places) by which a sum turns the array of which its operands are the two parts, each padded; else None.

    The derivative of a rotation is such a sum.
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
    turned = [d for d, pair in enumerate(zip(first, last, strict=True)) if pair != ((0, 0, 0), (0, 0, 0))]
    if len(turned) != 1:
        return None
    (d,) = turned
    (low, high, inside), (other_low, other_high, other_inside) = first[d], last[d]
    length = op.site[0].outvars[0].aval.shape[d]
    one_sided = not inside and not other_inside and low * high == other_low * other_high == 0
    fit = one_sided and low + high + other_low + other_high == length and bool(low) != bool(other_low)
    return (d, max(low, other_low)) if fit else None


def _is_zero(atom: Any) -> bool:
    return compat.is_literal(atom) and not atom.val


def _source(op: Op) -> int:
    return op.operands[0]


def of_rotation(op: Op, makers: Mapping[int, Op]) -> Iterator[Op]:
    """The ops whose results alone a rotation is made of: XLA knows it by them, if nothing is said of these."""
    if rotation(op, makers) is not None:
        yield from (makers[v] for v in op.operands)
    elif rotation_back(op, makers) is not None:
        for pad in (makers[v] for v in op.operands):
            yield from (pad, makers[pad.operands[0]])
