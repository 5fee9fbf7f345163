"""Sharded arrays drawn as rectangles that mesh axes cut: as SVG for notebooks, and in characters for terminals.

The rows and columns of a rectangle are the last dims that are sharded, or the longest ones. The sheets of more sharded
dims lie behind each other. Axes of one device cut nothing and are not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..spec import Axis, Spec, axis_name, axis_size, local_shape, num_parts
from .axis_colors import color, drawn

MAX_WIDTH = 880
"""Pixels of a row of arrays, the width of a notebook's cell."""
MAX_LINES, MAX_SHEETS, MAX_CELLS = 32, 4, 8
"""Parts of a dim that are drawn, as lines, as sheets, and in characters; the caption has the real number."""
CHARACTER, LINE, GAP, SHEET = 6.7, 15, 26, 5
"""Pixels: of a character and a line of a caption, between arrays, and between sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPicture:
    """One array: what its caption says, and how its dims are cut."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: Spec

    def caption(self, sizes: Mapping[str, int]) -> tuple[str, str, str]:
        """Its name, its type and spec, and the shape of one device's shard."""
        local = list(local_shape(self.spec.axes, self.shape, sizes))
        return self.name, f"{self.dtype}{list(self.shape)} {self.spec}", f"per device {local}"

    def dims(self) -> tuple[tuple[int, ...], int | None, int | None]:
        """The dims drawn as sheets, as rows and as columns."""
        sharded = [d for d, axes in enumerate(self.spec.axes) if axes]
        longest = sorted(range(len(self.shape)), key=lambda d: -self.shape[d])
        chosen = sorted([*sharded, *(d for d in longest if d not in sharded)][: max(2, len(sharded))])
        rows, columns = [None, None, *chosen][-2:]
        return tuple(chosen[:-2]), rows, columns

    @property
    def sheet_axes(self) -> tuple[Axis, ...]:
        """The axes over which the dims drawn as sheets are sharded."""
        return tuple(axis for dim in self.dims()[0] for axis in self.spec.axes[dim])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Arrays side by side; an SVG in notebooks, characters in a terminal."""

    arrays: tuple[ArrayPicture, ...]
    sizes: Mapping[str, int]
    """Of the mesh axes."""

    @property
    def svg(self) -> str:
        """The SVG."""
        return "".join(_svg(self))

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto;max-width:100%">{self.svg}</div>'

    def __str__(self) -> str:
        legend = ", ".join(f"{axis}={size}" for axis, size in drawn(self.sizes).items())
        pictures = ["\n".join(_characters(a, self.sizes)) for a in self.arrays]
        return "\n\n".join([*pictures, f"mesh {legend or 'of one device'}"])

    __repr__ = __str__

    def save(self, path: str | Path) -> None:
        """Writes the SVG file."""
        Path(path).write_text(self.svg, encoding="utf-8")


def _pixels(length: int) -> float:
    """The side of a rectangle: longer for longer dims, but a million rows still fit."""
    return min(150.0, max(18.0, 14 * math.log2(max(2, length))))


def _svg(drawing: Drawing) -> Iterator[str]:
    """The parts of the SVG: arrays from left to right, wrapped into rows, then the legend of the axes."""
    axes = drawn(drawing.sizes)
    numbers = {axis: k for k, axis in enumerate(axes)}
    parts: list[str] = []
    x, y, below, right = 10.0, 10.0, 0.0, 0.0
    for array in drawing.arrays:
        width, height = _extent(array, drawing.sizes)
        if x > 10 and x + width > MAX_WIDTH:
            x, y, below = 10.0, y + below + GAP, 0.0
        parts += _panel(array, drawing.sizes, numbers, x, y)
        x, below, right = x + width + GAP, max(below, height), max(right, x + width)
    y += below + GAP
    x = 10.0
    for axis, size in axes.items():
        label = f"{axis}={size}"
        parts.append(f'<rect x="{x:g}" y="{y - 9:g}" width="10" height="10" fill="{color(numbers[axis])}"/>')
        parts.append(_text(x + 15, y, label))
        x += 15 + CHARACTER * len(label) + 18
        right = max(right, x)
    size = f'width="{right + 10:.0f}" height="{y + 12:.0f}" viewBox="0 0 {right + 10:.0f} {y + 12:.0f}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="11" role="img">'
    yield f"<title>{escape(', '.join(a.name for a in drawing.arrays))}</title>"
    yield '<rect width="100%" height="100%" fill="#ffffff"/>'
    yield from parts
    yield "</svg>"


def _extent(array: ArrayPicture, sizes: Mapping[str, int]) -> tuple[float, float]:
    _, rows, columns = array.dims()
    caption = array.caption(sizes)
    sheets = SHEET * (_num_sheets(array, sizes) - 1)
    width = max(_side(array, columns) + sheets, CHARACTER * max(map(len, caption)))
    return width, LINE * len(caption) + _side(array, rows) + sheets


def _side(array: ArrayPicture, dim: int | None) -> float:
    return _pixels(1 if dim is None else array.shape[dim])


def _num_sheets(array: ArrayPicture, sizes: Mapping[str, int]) -> int:
    return min(MAX_SHEETS, num_parts(array.sheet_axes, sizes))


def _panel(
    array: ArrayPicture, sizes: Mapping[str, int], numbers: Mapping[str, int], x: float, y: float
) -> Iterator[str]:
    for k, line in enumerate(array.caption(sizes)):
        yield _text(x, y + LINE * (k + 0.6), line, is_bold=k == 0)
    _, rows, columns = array.dims()
    width, height, num = _side(array, columns), _side(array, rows), _num_sheets(array, sizes)
    top = y + LINE * 3 + 4
    edges = {round(at * num): _color(axis, numbers) for at, axis, _ in _cuts(array.sheet_axes, sizes, MAX_SHEETS)}
    for k in reversed(range(1, num)):
        yield _rectangle(x + k * SHEET, top + k * SHEET, width, height, edges[k])
    yield _rectangle(x, top, width, height, "#555555")
    for dim, length in ((rows, height), (columns, width)):
        for at, axis, thickness in _cuts(array.spec.axes[dim] if dim is not None else (), sizes):
            ends = (x, top + at * length, x + width, top + at * length)
            if dim == columns:
                ends = (x + at * length, top, x + at * length, top + height)
            x1, y1, x2, y2 = (f"{end:.1f}" for end in ends)
            line = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
            yield f'<line {line} stroke="{_color(axis, numbers)}" stroke-width="{thickness:g}"/>'


def _cuts(axes: Sequence[Axis], sizes: Mapping[str, int], most: int = MAX_LINES) -> Iterator[tuple[float, Axis, float]]:
    """(position from 0 to 1, axis, thickness) of each line through a dim; those of major axes are thick, and last."""
    for k in reversed(range(len(axes))):
        parts = num_parts(axes[: k + 1], sizes)
        shown = min(parts, most)
        for i in range(1, shown):
            if parts > shown or i % axis_size(axes[k], sizes):
                yield i / shown, axes[k], max(1.0, 2.5 - k * 0.75)


def _color(axis: Axis, numbers: Mapping[str, int]) -> str:
    return color(numbers[axis if isinstance(axis, str) else axis[0]])


def _rectangle(x: float, y: float, width: float, height: float, edge: str) -> str:
    box = f'x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {box} fill="#f4f4f4" stroke="{edge}"/>'


def _text(x: float, y: float, text: str, *, is_bold: bool = False) -> str:
    weight = ' font-weight="bold"' if is_bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="#222222"{weight} xml:space="preserve">{escape(text)}</text>'


def _characters(array: ArrayPicture, sizes: Mapping[str, int]) -> Iterator[str]:
    """The lines of one array: its caption, and a grid whose cells are shards."""
    yield ", ".join(array.caption(sizes))
    sheets, rows, columns = array.dims()
    above, beside = _dim_text(array, columns, sizes), _dim_text(array, rows, sizes)
    num_rows, num_columns = (_num_cells(array, dim, sizes) for dim in (rows, columns))
    cell = 6
    margin = " " * len(beside)
    yield f"{margin}  {above}"
    rule = "+" + "+".join(["-" * cell] * num_columns) + "+"
    yield f"{margin} {rule}"
    for k in range(num_rows):
        yield f"{margin if k else beside} |" + "|".join([" " * cell] * num_columns) + "|"
        yield f"{margin} {rule}"
    if sheets:
        texts = ", ".join(_dim_text(array, dim, sizes) for dim in sheets)
        yield f"{margin} one of {num_parts(array.sheet_axes, sizes)} sheets, {texts}"


def _num_cells(array: ArrayPicture, dim: int | None, sizes: Mapping[str, int]) -> int:
    return 1 if dim is None else min(MAX_CELLS, num_parts(array.spec.axes[dim], sizes))


def _dim_text(array: ArrayPicture, dim: int | None, sizes: Mapping[str, int]) -> str:
    if dim is None:
        return ""
    axes = array.spec.axes[dim]
    over = f" over {', '.join(f'{axis_name(a)}={axis_size(a, sizes)}' for a in axes)}" if axes else ""
    shown = f" ({MAX_CELLS} drawn)" if num_parts(axes, sizes) > MAX_CELLS else ""
    return f"dim {dim}: {array.shape[dim]}{over}{shown}"
