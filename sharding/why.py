"""Reasons in words: the way of an axis back to its annotation, and conflicts; what repeats from layer to layer once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .graph import Graph
from .paths import pattern
from .propagation import Conflict, Reason

LONGEST = 256
"""The most steps that are looked for as one repeated layer."""


@dataclass(frozen=True, slots=True)
class Why:
    """The steps from one axis of one dim back to the annotation it came from; prints one step a line."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)


class Conflicts(tuple[Conflict, ...]):
    """All conflicts, in program order; prints those that differ in a layer's index only as one line."""

    def __str__(self) -> str:
        kinds: dict[str, list[Conflict]] = {}
        for conflict in self:
            kinds.setdefault(pattern(str(conflict)), []).append(conflict)
        return "\n".join(
            str(alike[0]) if len(alike) == 1 else f"{kind} (x{len(alike)})" for kind, alike in kinds.items()
        )

    __repr__ = __str__


def way(graph: Graph, steps: Iterable[tuple[int, int, Reason]]) -> list[str]:
    """One line per (value, dim, reason); layers through which an axis comes in the same steps are written once."""
    lines = [_step(graph, *step) for step in steps]
    found: list[str] = []
    for start, period, times in repeats(list(map(pattern, lines))):
        found += lines[start : start + period]
        if times > 1:
            found.append(f"({'this step' if period == 1 else f'these {period} steps'} {times - 1} times more)")
    return found


def _step(graph: Graph, value: int, dim: int, reason: Reason) -> str:
    who = f"{graph.label(value)} dim {dim}"
    if reason.value is None:
        return f"{who} <- {reason.source}"
    at, of = f" at {reason.source}" if reason.source else "", f", from {reason.array}" if reason.array else ""
    return f"{who} <- {reason.word}{at}{of}"


def repeats(items: Sequence[Hashable]) -> Iterator[tuple[int, int, int]]:
    """(start, period, times) of runs that make up the whole sequence; what does not repeat has period and times 1.

    At each place the run that covers most, of those the one with the shortest period.
    """
    at = 0
    while at < len(items):
        period, times = max(_runs(items, at), key=lambda run: (run[0] * run[1], -run[0]))
        yield at, period, times
        at += period * times


def _runs(items: Sequence[Hashable], at: int) -> Iterator[tuple[int, int]]:
    yield 1, 1
    for period in range(1, min(LONGEST, (len(items) - at) // 2) + 1):
        times = 1
        while items[at : at + period] == items[at + times * period : at + (times + 1) * period]:
            times += 1
        if times > 1:
            yield period, times
