"""The windows that ops slide over their first operand: convolutions, pooling, slices and pads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How a dim of a result is computed from one of the operand: the window of row i begins at row i x step - low."""

    dim: int
    result_dim: int
    size: int = 1
    step: int = 1
    low: int = 0
    """Rows of padding before the operand; negative if rows are cut off."""
    high: int = 0
    """The same behind it."""
    spacing: int = 1
    """Between the rows of the window."""
    gap: int = 1
    """Between the rows of the operand: its dilation."""

    @property
    def is_trivial(self) -> bool:
        """Whether row i of the result is row i of the operand."""
        return (self.size, self.step, self.low, self.high, self.gap) == (1, 1, 0, 0, 1)


def _convolution(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[Window]:
    numbers = params["dimension_numbers"]
    dims = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    keys = ("window_strides", "padding", "rhs_dilation", "lhs_dilation")
    for (dim, kernel, result_dim), step, (low, high), spacing, gap in zip(
        dims, *(params[key] for key in keys), strict=True
    ):
        size = shapes[1][kernel]
        yield Window(dim=dim, result_dim=result_dim, size=size, step=step, low=low, high=high, spacing=spacing, gap=gap)


def _pooling(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[Window]:
    del shapes
    lengths, steps, padding = params["window_dimensions"], params["window_strides"], params["padding"]
    dilation = params.get("window_dilation") or (1,) * len(lengths)
    gaps = params.get("base_dilation") or (1,) * len(lengths)
    for d, (size, step, (low, high), spacing, gap) in enumerate(
        zip(lengths, steps, padding, dilation, gaps, strict=True)
    ):
        yield Window(dim=d, result_dim=d, size=size, step=step, low=low, high=high, spacing=spacing, gap=gap)


def _slice(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[Window]:
    steps = params["strides"] or (1,) * len(params["start_indices"])
    rows = zip(params["start_indices"], params["limit_indices"], steps, shapes[0], strict=True)
    for d, (start, end, step, length) in enumerate(rows):
        yield Window(dim=d, result_dim=d, step=step, low=-start, high=end - length)


def _pad(params: Params, shapes: Sequence[Sequence[int]]) -> Iterator[Window]:
    del shapes
    for d, (low, high, gap) in enumerate(params["padding_config"]):
        yield Window(dim=d, result_dim=d, low=low, high=high, gap=gap + 1)


WINDOWS: dict[str, Callable[[Params, Sequence[Sequence[int]]], Iterator[Window]]] = {
    "conv_general_dilated": _convolution,
    "pad": _pad,
    "slice": _slice,
    **dict.fromkeys(("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"), _pooling),
}
"""Primitive -> the window of each dim that it slides over; the other dims are sharded identically."""
