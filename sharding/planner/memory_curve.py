"""The least cost within each of several memory limits, and its chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ..display import Column, Table, Tabular
from ..display.chart import Chart
from ..display.units import bytes_text
from ..errors import ShardingError
from .algorithms import solve
from .problem import Problem
from .solution import Solution

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 640, 360, 84, 34, 48, 24
"""Of the chart and its margins, in pixels."""
NUM_TICKS = 5
COLUMNS = (Column("limit", "bytes"), Column("peak", "bytes"), Column("cost", "number"), Column("proven"))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MemoryCurve(Tabular):
    """Solutions of one problem within falling limits; costs rise as limits fall.

    Example:
        >>> curve = memory_curve(Problem.of([[3, 1]], usages=[[1, 2]]), limits=[2, 1])
        >>> [s.cost for s in curve.solutions], curve.plot().svg.count("<circle")
        ([1.0, 3.0], 2)
    """

    problem: Problem
    solutions: tuple[Solution, ...]
    limits: tuple[float, ...]

    def tables(self) -> list[Table]:
        """One row per limit, the largest first."""
        rows = [
            (limit, s.peak_bytes, s.cost, "yes" if s.is_proven else "no")
            for limit, s in zip(self.limits, self.solutions, strict=True)
        ]
        return [Table(f"cost within memory limits of {self.problem!r}", COLUMNS, rows)]

    def __str__(self) -> str:
        return str(self.tables()[0])

    __repr__ = __str__

    def plot(self, unit: str = "cost") -> Chart:
        """Peak memory to the right, cost upwards; each point is a solution."""
        points = sorted({(s.peak_bytes, s.cost) for s in self.solutions})
        most_bytes, most_cost = points[-1][0] or 1.0, max(cost for _, cost in points) or 1.0

        def x(num_bytes: float) -> float:
            return LEFT + num_bytes / most_bytes * (WIDTH - LEFT - RIGHT)

        def y(cost: float) -> float:
            return HEIGHT - BOTTOM - cost / most_cost * (HEIGHT - TOP - BOTTOM)

        title = escape(f"{self.problem.name or 'problem'}: {unit} by peak memory")
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            f'font-family="sans-serif" font-size="12"><title>{title}</title>',
            f'<text x="{LEFT}" y="18">{title}</text>',
            f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#333"/>',
        ]
        for k in range(NUM_TICKS + 1):
            num_bytes, cost = most_bytes * k / NUM_TICKS, most_cost * k / NUM_TICKS
            parts.append(
                f'<text x="{x(num_bytes):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
                f"{bytes_text(int(num_bytes))}</text>"
            )
            parts.append(f'<text x="{LEFT - 6}" y="{y(cost) + 4:.1f}" text-anchor="end">{cost:,.4g}</text>')
        line = " ".join(f"{x(num_bytes):.1f},{y(cost):.1f}" for num_bytes, cost in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="#1a5fb4" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(num_bytes):.1f}" cy="{y(cost):.1f}" r="4" fill="#1a5fb4">'
            f"<title>{bytes_text(int(num_bytes))}: {cost:,.6g}</title></circle>"
            for num_bytes, cost in points
        ]
        return Chart("".join([*parts, "</svg>"]))


def memory_curve(
    problem: Problem, *, limits: Sequence[float] | int = 8, algorithm: str = "auto", seconds: float = 60, seed: int = 0
) -> MemoryCurve:
    """The least costs within memory limits, for problems that are too large for `frontier`.

    Args:
        problem: what to solve.
        limits: in bytes, or how many, evenly spaced between the smallest peak and that of the cheapest choice.
        algorithm: a key of `ALGORITHMS`, or "auto".
        seconds: for all limits together.
        seed: of random decisions.

    Raises:
        ShardingError: no limits; limits within which nothing fits are left out, unless nothing fits within any.

    Example:
        >>> problem = Problem.of([[0, 3], [2, 0]], [(0, 1, [[0, 5], [5, 0]])], usages=[[8, 4], [8, 4]])
        >>> [(limit, s.cost) for limit, s in zip([16, 12, 8], memory_curve(problem, limits=[16, 12, 8]).solutions)]
        [(16, 2.0), (12, 3.0), (8, 3.0)]
    """
    if isinstance(limits, int):
        cheapest = solve(problem, algorithm, float("inf"), seconds / (limits + 1), seed)
        asked = np.linspace(cheapest.peak_bytes, problem.least_peak_bytes, max(limits, 1)).tolist()
    else:
        asked = sorted(limits, reverse=True)
    if not asked:
        raise ShardingError("planner.memory_curve(limits=[])", required="at least one limit")
    found: list[tuple[float, Solution]] = []
    refused: ShardingError | None = None
    for limit in asked:
        try:
            found.append((limit, solve(problem, algorithm, limit, seconds / len(asked), seed)))
        except ShardingError as error:
            refused = error
    if not found and refused is not None:
        raise refused
    return MemoryCurve(problem=problem, solutions=tuple(s for _, s in found), limits=tuple(limit for limit, _ in found))
