"""Gantt chart of a simulated schedule as SVG: a row per device, a box per task, legible without colour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from ..display.chart import Chart
from .task_table import KINDS, LETTERS, Kind, Task, TaskTable

ROW, BOX, LEFT, TOP, MARGIN = 34, 28, 76, 30, 12
"""Height of a row and of a box in it, and the margins, in pixels."""
STEP = 60
"""Minimum distance of two ticks of the time axis, in pixels."""
CHARACTER = 7.2
"""Width of a label's character, in pixels."""
WIDEST = 20_000
"""Maximum width in pixels; boxes too narrow for their label show it as a tooltip only."""

STYLES: dict[Kind, str] = {
    "forward": 'fill="#cfe2ff" stroke="#333"',
    "backward": 'fill="#ffd8a8" stroke="#333" stroke-width="2"',
    "backward-input": 'fill="#ffe8cc" stroke="#333" stroke-dasharray="4 2"',
    "backward-weight": 'fill="#d3f0d3" stroke="#333" stroke-dasharray="1 2"',
}


class Span(NamedTuple):
    """A task with its device and times."""

    task: Task
    device: int
    start: float
    end: float


def chart(table: TaskTable, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> Chart:
    """The chart of a table with these start and end times, per device and position."""
    spans = [Span(task, at, starts[at][place], ends[at][place]) for task, at, place in table.located()]
    makespan = max(span.end for span in spans)
    scale = _pixels_per_unit(spans, makespan)
    width, bottom = LEFT + makespan * scale + MARGIN, TOP + ROW * table.devices
    title = f"Schedule {table.name}: {table.stages} stages, {table.microbatches} microbatches, {table.devices} devices"
    several = [len(stages) > 1 for stages in table.placement]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{bottom + 2 * ROW}" '
        f'viewBox="0 0 {width:.0f} {bottom + 2 * ROW}" font-family="monospace" font-size="12" fill="#111">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(_description(table, starts, ends, makespan))}</desc>",
        f'<rect width="{width:.0f}" height="{bottom + 2 * ROW}" fill="#fff"/>',
        _text(MARGIN, TOP - 12, f"{title}; makespan {makespan:g}"),
        *(_text(MARGIN, TOP + ROW * device + 19, f"device {device}") for device in range(table.devices)),
        *(_box(span, scale, several[span.device]) for span in spans),
        *_axis(makespan, scale, bottom + 12),
        *_legend(table, bottom + ROW),
        "</svg>",
    ]
    return Chart("\n".join(parts) + "\n")


def _pixels_per_unit(spans: Sequence[Span], makespan: float) -> float:
    """The scale at which every label fits its box, limited by the maximum width."""
    needed = [_label_width(span.task) / (span.end - span.start) for span in spans if span.end > span.start]
    return min(max(needed), WIDEST / makespan) if needed else 1.0


def _label_width(task: Task) -> float:
    return max(24.0, CHARACTER * len(task.label) + 6)


def _box(span: Span, scale: float, several: bool) -> str:
    """A task with its label, and its stage on a second line where the device runs several."""
    task, top, width = span.task, TOP + ROW * span.device, (span.end - span.start) * scale
    x = LEFT + span.start * scale
    when = f"device {span.device}, from {span.start:g} to {span.end:g}"
    hint = escape(f"{task}, weight version {task.version}, {when}")
    words = ""
    if width >= _label_width(task):
        middle, style = x + width / 2, 'text-anchor="middle"'
        words = _text(middle, top + (12 if several else 18), task.label, style)
        words += _text(middle, top + 24, f"s{task.stage}", f'{style} font-size="10"') if several else ""
    box = f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BOX}" {STYLES[task.kind]}/>'
    return f"<g><title>{hint}</title>{box}{words}</g>"


def _axis(makespan: float, scale: float, y: float) -> Iterator[str]:
    """The time axis, in round steps from 0."""
    step = _round_step(STEP / scale)
    for number in range(int(makespan / step + 1e-9) + 1):
        yield _text(LEFT + number * step * scale, y, f"{number * step:g}", 'text-anchor="middle" font-size="10"')


def _round_step(least: float) -> float:
    """The smallest of ... 0.5, 1, 2, 5, 10 ... that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)


def _legend(table: TaskTable, y: float) -> Iterator[str]:
    """Letters and fills of the kinds that occur."""
    occurring: list[Kind] = [kind for kind in KINDS if any(one.task.kind == kind for one in table.located())]
    for place, kind in enumerate(occurring):
        x = MARGIN + 170 * place
        yield f'<rect x="{x}" y="{y}" width="14" height="14" {STYLES[kind]}/>'
        yield _text(x + 19, y + 12, f"{LETTERS[kind]} {kind}")


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _description(
    table: TaskTable, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]], makespan: float
) -> str:
    """The tasks of each device with their first start and last end."""
    devices = [
        f"Device {device}, from {starts[device][0]:g} to {ends[device][-1]:g}: {' '.join(t.label for t in order)}."
        for device, order in enumerate(table.orders)
    ]
    letters = ", ".join(f"{letter} {kind}" for kind, letter in LETTERS.items())
    return f"Makespan {makespan:g}. {' '.join(devices)} Letters: {letters}; the number is the microbatch."
