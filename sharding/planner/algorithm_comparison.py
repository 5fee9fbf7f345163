"""All algorithms on one problem side by side: cost, gap to the best bound, time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..display import Column, Table, Tabular
from ..errors import ShardingError
from .algorithms import ALGORITHMS, check_algorithm
from .problem import Problem
from .solution import Solution

COLUMNS = (
    Column("algorithm"),
    Column("cost", "number"),
    Column("above the best bound", "share"),
    Column("proven"),
    Column("peak", "bytes"),
    Column("evaluations", "number"),
    Column("time", "seconds"),
    Column("note"),
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AlgorithmComparison(Tabular):
    """What each algorithm finds for one problem.

    Example:
        >>> found = compare(Problem.of([[3, 1]]), ["exhaustive"])
        >>> found.bound
        1.0
    """

    problem: Problem
    solutions: dict[str, Solution]
    refusals: dict[str, str]
    """Algorithm -> why it has no solution."""

    @property
    def bound(self) -> float:
        """The highest bound of any algorithm: no choice costs less."""
        return max((s.bound for s in self.solutions.values()), default=-math.inf)

    def tables(self) -> list[Table]:
        """One table, cheapest first; then those without a solution."""
        rows = []
        for name, s in sorted(self.solutions.items(), key=lambda item: item[1].cost):
            gap = (s.cost - self.bound) / abs(self.bound) if self.bound and math.isfinite(self.bound) else None
            proven = "yes" if s.is_proven else "no"
            rows.append((name, round(s.cost, 3), gap, proven, s.peak_bytes, s.evaluations, s.seconds, ""))
        rows += [(name, None, None, "", None, None, None, why) for name, why in self.refusals.items()]
        return [Table(f"algorithms on {self.problem!r}", COLUMNS, rows)]

    def __str__(self) -> str:
        return str(self.tables()[0])

    __repr__ = __str__


def compare(
    problem: Problem,
    algorithms: Iterable[str] | None = None,
    *,
    memory_bytes: float | None = None,
    seconds: float = 10,
    seed: int = 0,
) -> AlgorithmComparison:
    """Solves one problem by several algorithms.

    Args:
        problem: what to solve.
        algorithms: keys of `ALGORITHMS`. Default: all.
        memory_bytes: the limit; None is the problem's own, inf removes it.
        seconds: for each algorithm.
        seed: of random decisions.

    Raises:
        ShardingError: an unknown algorithm. What an algorithm refuses is in its row.

    Example:
        >>> problem = Problem.of([[0, 3], [2, 0]], [(0, 1, [[0, 5], [5, 0]])])
        >>> found = compare(problem, ["alpa", "optcnn"])
        >>> [(name, s.cost, s.is_proven) for name, s in found.solutions.items()]
        [('alpa', 2.0, True), ('optcnn', 2.0, True)]
    """
    names = list(ALGORITHMS if algorithms is None else algorithms)
    for name in names:
        check_algorithm(name)
    solutions: dict[str, Solution] = {}
    refusals: dict[str, str] = {}
    for name in names:
        try:
            solutions[name] = ALGORITHMS[name](problem, memory_bytes=memory_bytes, seconds=seconds, seed=seed)
        except ShardingError as error:
            refusals[name] = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
    return AlgorithmComparison(problem=problem, solutions=solutions, refusals=refusals)
