"""The colours of mesh axes: the same in drawings and in the report, distinct for any number of axes."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Mapping
from functools import cache

LIGHT = ("#0072b2", "#d55e00", "#008f68", "#b0528f", "#8a6a00", "#3a9bd0", "#6b6f76", "#7a4fd0")
DARK = ("#56a8e0", "#f08a4b", "#3cc79b", "#e08cc0", "#d9b33a", "#8fd0f5", "#aab0b8", "#b79bf0")
"""Of the first axes, on a light and on a dark ground; Okabe and Ito's colours where they are dark enough."""


def color(number: int, *, is_dark: bool = False) -> str:
    """The colour of the axis with this number, as `#0072b2`; past the first eight the one least like those before."""
    return _palette(number + 1, is_dark)[number]


@cache
def _palette(num: int, is_dark: bool) -> tuple[str, ...]:
    chosen: list[str] = [*(DARK if is_dark else LIGHT)]
    lightnesses = (0.62, 0.72, 0.82) if is_dark else (0.25, 0.38, 0.5)
    candidates = [_hex(hue / 24, lightness) for hue in range(24) for lightness in lightnesses]
    while len(chosen) < num:
        chosen.append(max(candidates, key=lambda c: min(_distance(c, other) for other in chosen)))
    return tuple(chosen)


def _hex(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, 0.8))


def _distance(a: str, b: str) -> float:
    return math.dist(*(tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in (a, b)))


def drawn(sizes: Mapping[str, int]) -> dict[str, int]:
    """The axes that are drawn, those of more than one device, and their sizes."""
    return {axis: size for axis, size in sizes.items() if size > 1}


def style_sheet(num_axes: int) -> str:
    """CSS classes `c0`, `c1`, ... that set `--c` to the colour of an axis on a light or dark ground."""

    def rules(is_dark: bool) -> Iterable[str]:
        return (f".c{k} {{ --c: {color(k, is_dark=is_dark)}; }}" for k in range(num_axes))

    return "\n".join([*rules(False), "@media (prefers-color-scheme: dark) {", *rules(True), "}"])
