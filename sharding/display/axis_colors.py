"""The colours of mesh axes: the same in drawings and in the report, distinct for any number of axes."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping

LIGHT = ("#0072b2", "#d55e00", "#008f68", "#b0528f", "#8a6a00", "#3a9bd0", "#6b6f76", "#7a4fd0")
DARK = ("#56a8e0", "#f08a4b", "#3cc79b", "#e08cc0", "#d9b33a", "#8fd0f5", "#aab0b8", "#b79bf0")
"""Of the first axes, on a light and on a dark ground; Okabe and Ito's colours where they are dark enough."""
_GOLDEN_TURN = 0.381966


def color(number: int, *, is_dark: bool = False) -> str:
    """The colour of the axis with this number, as `#0072b2`.

    Past the first eight the hue turns by the golden angle, at one of two lightnesses, so that no two are equal.
    """
    base = DARK if is_dark else LIGHT
    if number < len(base):
        return base[number]
    k = number - len(base)
    lightness = (0.78, 0.62) if is_dark else (0.30, 0.52)
    red, green, blue = colorsys.hls_to_rgb((0.13 + k * _GOLDEN_TURN) % 1, lightness[k % 2], 0.75)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def drawn(sizes: Mapping[str, int]) -> dict[str, int]:
    """The axes that are drawn, those of more than one device, and their sizes."""
    return {axis: size for axis, size in sizes.items() if size > 1}


def style_sheet(num_axes: int) -> str:
    """CSS classes `c0`, `c1`, ... that set `--c` to the colour of an axis on a light or dark ground."""

    def rules(is_dark: bool) -> Iterable[str]:
        return (f".c{k} {{ --c: {color(k, is_dark=is_dark)}; }}" for k in range(num_axes))

    return "\n".join([*rules(False), "@media (prefers-color-scheme: dark) {", *rules(True), "}"])
