"""Loss curve as SVG: a thin line for training, a thick one for its running mean, dots for held-out values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Points = Sequence[tuple[float, float]]
Scale = Literal["linear", "log"]

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 40, 44
TRAIN_COLOUR, HELDOUT_COLOUR, INK, GRID = "#4878a8", "#d1603d", "#444", "#e4e4e4"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Maps a range of values to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    scale: Scale

    def pixel(self, value: float) -> float:
        """The pixel of `value`."""
        low, high = self._measure(self.low), self._measure(self.high)
        share = (self._measure(value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """About six round values inside the range."""
        return _log_ticks(self.low, self.high) if self.scale == "log" else _linear_ticks(self.low, self.high)

    def _measure(self, value: float) -> float:
        return math.log(max(value, 1e-12)) if self.scale == "log" else value


def svg(
    train: Points,
    heldout: Points,
    *,
    title: str = "",
    unit: str = "bits per byte",
    y_scale: Scale = "log",
    x_scale: Scale = "linear",
) -> str:
    """The loss in `unit` over steps, as the text of a standalone SVG element."""
    train, heldout = _drawable(train, x_scale), _drawable(heldout, x_scale)
    points = [*train, *heldout] or [(0.0, 1.0)]
    x_axis, y_axis = _axes(points, x_scale, y_scale)
    body = [
        *_frame(x_axis, y_axis, title, unit),
        _line(train, x_axis, y_axis, f'stroke="{TRAIN_COLOUR}" stroke-opacity="0.3" stroke-width="1"'),
        _line(smooth(train), x_axis, y_axis, f'stroke="{TRAIN_COLOUR}" stroke-width="2"'),
        _line(heldout, x_axis, y_axis, f'stroke="{HELDOUT_COLOUR}" stroke-width="2"'),
        *(_dot(point, x_axis, y_axis, unit) for point in heldout),
        *_legend(heldout),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n' + "\n".join(filter(None, body)) + "\n</svg>\n"
    )


def smooth(points: Points, *, share: float = 0.03) -> Points:
    """The running mean over `share` of all points on either side."""
    reach = max(1, round(len(points) * share))
    means = []
    for index, (step, _) in enumerate(points):
        near = points[max(0, index - reach) : index + reach + 1]
        means.append((step, sum(value for _, value in near) / len(near)))
    return means


def _drawable(points: Points, x_scale: Scale) -> Points:
    """The points with a finite positive value, and on a logarithmic axis a positive step."""
    first = 0 if x_scale == "linear" else 1
    return [(step, value) for step, value in points if math.isfinite(value) and value > 0 and step >= first]


def _axes(points: Points, x_scale: Scale, y_scale: Scale) -> tuple[Axis, Axis]:
    steps, values = [step for step, _ in points], [value for _, value in points]
    left = max(1.0, min(steps)) if x_scale == "log" else 0.0
    x_axis = Axis(low=left, high=max(*steps, left + 1), start=LEFT, end=WIDTH - RIGHT, scale=x_scale)
    bottom, top = min(values) * 0.96, max(values) * 1.02
    return x_axis, Axis(low=bottom, high=top, start=HEIGHT - BOTTOM, end=TOP, scale=y_scale)


def _frame(x_axis: Axis, y_axis: Axis, title: str, unit: str) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<text x="{LEFT}" y="22" fill="{INK}" font-size="14" font-weight="600">{escape(title)}</text>']
    for value in y_axis.ticks():
        y = y_axis.pixel(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{INK}">{value:g}</text>')
    for value in x_axis.ticks():
        x = x_axis.pixel(value)
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="{INK}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="{INK}">{value:g}</text>')
    parts.append(f'<path d="M{LEFT} {bottom}H{right}" stroke="{INK}"/>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle" fill="{INK}">step</text>')
    across = (TOP + bottom) / 2
    place = f'transform="translate(14 {across:.0f}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text {place} fill="{INK}">{escape(unit)}</text>')
    return parts


def _line(points: Points, x_axis: Axis, y_axis: Axis, style: str) -> str:
    if len(points) < 2:
        return ""
    pixels = " ".join(f"{x_axis.pixel(x):.1f},{y_axis.pixel(y):.1f}" for x, y in points)
    return f'<polyline points="{pixels}" fill="none" stroke-linejoin="round" {style}/>'


def _dot(point: tuple[float, float], x_axis: Axis, y_axis: Axis, unit: str) -> str:
    x, y = x_axis.pixel(point[0]), y_axis.pixel(point[1])
    label = escape(f"step {point[0]:g}: {point[1]:.3f} {unit}")
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{HELDOUT_COLOUR}"><title>{label}</title></circle>'


def _legend(heldout: Points) -> list[str]:
    last = f" ({heldout[-1][1]:.2f})" if heldout else ""
    rows = [("train", TRAIN_COLOUR), (f"held out{last}", HELDOUT_COLOUR)]
    parts = []
    for row, (text, colour) in enumerate(rows):
        x, y = WIDTH - RIGHT - 140, TOP + 14 + 18 * row
        parts.append(f'<path d="M{x} {y}h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 26}" y="{y + 4}" fill="{INK}">{text}</text>')
    return parts


def _linear_ticks(low: float, high: float, *, about: int = 6) -> list[float]:
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step), math.floor(high / step + 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """One, two and five times powers of ten; evenly spaced if the range is too short for those."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside if len(inside) >= 4 else _linear_ticks(low, high, about=7)
