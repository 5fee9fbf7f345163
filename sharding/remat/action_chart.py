"""Chart of a recomputation schedule as SVG: which states and records are held when, and which steps run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from ..display.chart import Chart
from .actions import Action, Advance, Backward, Record
from .replay import replay

LEFT, TOP, MARGIN, WIDTH, HEIGHT = 76, 34, 12, 1_000, 600
"""The margins, and the most width and height between them, in pixels."""
STEP, ROW = 26, 18
"""Most pixels of a step's run, and of the row of a state."""
LEGEND = (("held state", "#cfe2ff"), ("forward", "#333"), ("record", "#d3f0d3"), ("backward", "#ffd8a8"))


class Bar(NamedTuple):
    """Something on the row of a state or step, from one time to another, in runs of steps."""

    kind: str
    row: int
    start: int
    end: int
    last: int
    """The row at the end, for steps that advance."""


def bars(name: str, steps: int, actions: Sequence[Action]) -> list[Bar]:
    """The intervals in which states and records are held, and the runs of steps."""
    found: list[Bar] = []
    since: dict[tuple[str, int], int] = {}
    now = 0
    for _, action, memory in replay(name, steps, actions):
        begin = now
        match action:
            case Advance(start, stop):
                now += stop - start
                found.append(Bar("forward", start, begin, now, stop))
            case Record(step) | Backward(step):
                now += 1
                kind = "backward" if isinstance(action, Backward) else "forward"
                found.append(Bar(kind, step, begin, now, step + (kind == "forward")))
        held = {("held state", s) for s in memory.stored} | {("record", s) for s in memory.recorded}
        for kind, row in [key for key in since if key not in held]:
            found.append(Bar(kind, row, since.pop((kind, row)), now, row))
        since.update((key, begin) for key in held - since.keys())
    return found


def chart(title: str, name: str, steps: int, actions: Sequence[Action]) -> Chart:
    """The chart of a schedule: time to the right in runs of steps, states downwards."""
    found = bars(name, steps, actions)
    end = max(bar.end for bar in found)
    across, down = min(STEP, WIDTH / end), min(ROW, HEIGHT / (steps + 1))
    width, bottom = LEFT + max(end * across, 420) + MARGIN, TOP + (steps + 1) * down
    order = {"held state": 0, "record": 1, "backward": 2, "forward": 3}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{bottom + 40:.0f}" '
        f'viewBox="0 0 {width:.0f} {bottom + 40:.0f}" font-family="monospace" font-size="12" fill="#111">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{bottom + 40:.0f}" fill="#fff"/>',
        _text(MARGIN, 18, title),
        *(_text(MARGIN, TOP + (row + 0.8) * down, f"state {row}") for row in _labelled(steps, down)),
        *(_drawn(bar, across, down) for bar in sorted(found, key=lambda bar: order[bar.kind])),
        *_legend(bottom + 16),
        "</svg>",
    ]
    return Chart("\n".join(parts) + "\n")


def _labelled(steps: int, down: float) -> range:
    """The rows with a label: those that have the room."""
    return range(0, steps + 1, max(1, round(14 / down)))


def _drawn(bar: Bar, across: float, down: float) -> str:
    x, y = LEFT + bar.start * across, TOP + bar.row * down
    color = dict(LEGEND)[bar.kind]
    hint = f"<title>{bar.kind} {bar.row}, from {bar.start} to {bar.end}</title>"
    if bar.kind == "forward":
        x2, y2 = LEFT + bar.end * across, TOP + bar.last * down
        place = f'x1="{x:.1f}" y1="{y + down / 2:.1f}" x2="{x2:.1f}" y2="{y2 + down / 2:.1f}"'
        return f'<line {place} stroke="{color}" stroke-width="1.5">{hint}</line>'
    size = f'width="{(bar.end - bar.start) * across:.1f}" height="{max(down * 0.8, 0.5):.1f}"'
    return f'<rect x="{x:.1f}" y="{y + down * 0.1:.1f}" {size} fill="{color}" stroke="#333">{hint}</rect>'


def _legend(y: float) -> Iterator[str]:
    for place, (kind, color) in enumerate(LEGEND):
        x = MARGIN + 105 * place
        yield f'<rect x="{x}" y="{y:.1f}" width="12" height="12" fill="{color}" stroke="#333"/>'
        yield _text(x + 17, y + 11, kind)


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
