"""The integer program of a reduced problem, with memory at only those times at which it would be exceeded.

The cheapest choice without memory exceeds the limit; rows for the worst times are added until HiGHS's choice no longer
does. Each program is a relaxation of the problem, so that its bound holds.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from .core_problem import Core
from .linear_program import build, largest, minimise
from .problem import FORBIDDEN

MOST_NEW_TIMES = 12
"""Times that are added at once."""


class Outcome(NamedTuple):
    """What is known at the end."""

    choice: np.ndarray | None
    """The best found that fits; the optimal one if its cost is the bound."""
    bound: float


def minimise_core(core: Core, *, seconds: float, cheap: np.ndarray | None = None) -> Outcome:
    """The cheapest choice of a core within the limit, or None when time ends or nothing fits; and a bound.

    Args:
        core: what is left of a problem.
        seconds: the time limit.
        cheap: a choice that is nearly the cheapest without memory, for the first rows.
    """
    import scipy.sparse

    deadline, bound = time.monotonic() + seconds, -math.inf
    program, size = build(core.problem), int(core.problem.flat.offsets[-1])
    columns = len(program.objective)
    times = [] if cheap is None else _worst(core.excess(cheap), [])
    while (left := deadline - time.monotonic()) > 0:
        rows = [_row(core, t, columns) for t in times]
        memory = scipy.sparse.csr_array(np.vstack(rows)) if rows else scipy.sparse.csr_array((0, columns))
        # Rows of bytes are scaled to about 1, or the solver's tolerances would be meaningless.
        scale = max(1.0, float(np.abs(core.memory.limit).max(initial=1.0)))
        limited = program._replace(memory=memory / scale, limit=core.memory.limit[times] / scale)
        result = minimise(limited, num_integers=size, seconds=left)
        if result.status == 2:
            return Outcome(None, FORBIDDEN)
        if result.mip_dual_bound is not None:
            bound = max(bound, float(result.mip_dual_bound) + core.constant)
        choice = None if result.x is None else largest(core.problem, result.x)
        if choice is None:
            return Outcome(None, bound)
        excess = core.excess(choice)
        if excess.max(initial=0.0) <= 0:
            return Outcome(choice, core.cost(choice) if result.status == 0 else bound)
        new = _worst(excess, times)
        if result.status != 0 or not new:
            return Outcome(None, bound)
        times += new
    return Outcome(None, bound)


def _row(core: Core, at: int, columns: int) -> np.ndarray:
    """The usages of all strategies at a time."""
    memory = core.memory
    alive = ((memory.first <= at) & (at < memory.end))[memory.part]
    return np.bincount(memory.column[alive], memory.usages[alive], columns)


def _worst(excess: np.ndarray, known: list[int]) -> list[int]:
    """The times of largest excess, not too close to each other: neighbours' rows are nearly the same."""
    distance = max(1, len(excess) // 1000)
    found: list[int] = []
    for at in np.argsort(-excess, kind="stable").tolist():
        if excess[at] <= 0 or len(found) == MOST_NEW_TIMES:
            break
        if at not in known and all(abs(at - other) >= distance for other in found):
            found.append(at)
    return found
