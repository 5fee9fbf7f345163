"""`Solution`: what a solver found, and how good it is at worst."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..display import Column, Table
from ..errors import ShardingError
from .problem import Problem

ROUNDING = 2e-9
"""Relative error of a sum of costs and a bound."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Solution:
    """A strategy per node within the memory limit."""

    problem: Problem
    choice: np.ndarray
    """The index of each node's strategy, int64 [nodes]."""
    algorithm: str
    bound: float
    """No choice within the limit costs less."""
    evaluations: int
    """Choices or partial choices whose cost was calculated."""
    seconds: float

    @cached_property
    def cost(self) -> float:
        """The sum of node and edge costs."""
        return self.problem.cost(self.choice)

    @cached_property
    def peak_bytes(self) -> float:
        """The most memory at one time."""
        return self.problem.peak_bytes(self.choice)

    @property
    def gap(self) -> float:
        """By which part of the bound an optimal choice may cost less; inf without a bound."""
        if self.is_proven:
            return 0.0
        return (self.cost - self.bound) / abs(self.bound) if self.bound and math.isfinite(self.bound) else math.inf

    @property
    def is_proven(self) -> bool:
        """Whether no other choice costs less."""
        return is_proven(self.cost, self.bound)

    def table(self) -> Table:
        """Its figures."""
        columns = Column("algorithm"), Column("cost", "number"), Column("bound", "number"), Column("proven")
        more = Column("peak", "bytes"), Column("evaluations", "number"), Column("time", "seconds")
        row = self.algorithm, self.cost, self.bound, "yes" if self.is_proven else "no"
        return Table(
            f"solution of {self.problem!r}",
            (*columns, *more),
            [(*row, self.peak_bytes, self.evaluations, self.seconds)],
        )

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table().html()


def is_proven(cost: float, bound: float) -> bool:
    """Whether a cost is least, within the rounding of its sum and of the bound's."""
    return math.isfinite(cost) and cost <= bound + ROUNDING * max(1.0, abs(cost))


def nothing_found(problem: Problem, algorithm: str, *, is_proven: bool, fix: str = "") -> ShardingError:
    """The error of a solver that ends without a choice."""
    why = "every choice is forbidden or exceeds the limit" if is_proven else "none found in the given time"
    return ShardingError(
        f"planner.solve({problem!r}, {algorithm!r})",
        found=why,
        required=f"a choice within {problem.memory_bytes:,.0f} bytes and without forbidden pairs",
        fix=fix or ("a larger memory_bytes" if is_proven else "more seconds, or a larger memory_bytes"),
    )
