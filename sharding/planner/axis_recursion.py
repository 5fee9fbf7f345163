"""ToFu's recursion: an optimal plan for the first mesh axis, then for the second one given the first, and so on."""

from __future__ import annotations

import math
import time

import numpy as np

from ..errors import ShardingError
from . import lagrangian
from .core_problem import Core
from .memory_repair import fit
from .mesh_axes import allowed, num_rounds, restricted
from .problem import Problem
from .problem_reduction import Reduction
from .solution import Solution, nothing_found


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """The plan whose mesh axes are decided one by one, each with the least cost given the earlier ones.

    In a round each node has the strategies that shard as decided on earlier axes and nothing on later ones
    (`Problem.splits`). The memory limit holds in the last round, when arrays are as small as they get; if nothing fits
    there, single nodes are changed until the choice does. A problem without `splits` is one round, and then exact.

    Raises:
        ShardingError: nothing fits, or the rounds lead to no choice that does.

    References:
        Wang, Huang, Li, "Supporting Very Large Models using Automatic Dataflow Graph Partitioning", EuroSys 2019
        (1807.08887), section 5. Deviation: costs are the problem's, not only communication; a round's dynamic program
        is the default solver's, which needs no linear graph.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    rounds, choice = num_rounds(problem), None
    evaluations, bound = 0, -math.inf
    for axis in range(rounds):
        left = max(0.1, seconds - (time.monotonic() - start))
        strategies = allowed(problem, axis, choice)
        is_last = axis == rounds - 1
        solution = _round(problem, strategies, left / (rounds - axis), seed, is_last=is_last)
        choice = np.array([own[p] for own, p in zip(strategies, solution.choice, strict=True)], np.int64)
        evaluations += solution.evaluations
        bound = solution.bound if rounds == 1 else -math.inf
    assert choice is not None  # there is at least one round
    if not problem.is_feasible(choice):
        core, bound = Core.of(Reduction.of(problem), -math.inf), -math.inf
        if not fit(core, core.soft, choice) or not problem.is_feasible(choice):
            raise nothing_found(problem, "tofu", is_proven=False, fix='algorithm="auto"')
    return Solution(
        problem=problem,
        choice=choice,
        algorithm="tofu",
        bound=bound,
        evaluations=evaluations,
        seconds=time.monotonic() - start,
    )


def _round(problem: Problem, strategies: list[np.ndarray], seconds: float, seed: int, *, is_last: bool) -> Solution:
    """The cheapest choice of these strategies; if it is the last round and some choice fits, one that does."""
    part = restricted(problem, strategies)
    try:
        return lagrangian.solve(part, memory_bytes=None if is_last else math.inf, seconds=seconds, seed=seed)
    except ShardingError as error:
        if is_last and problem.splits:
            return _round(problem, strategies, seconds, seed, is_last=False)
        raise ShardingError(
            f"planner.solve({problem!r}, 'tofu')", found=error.found, required=error.required, fix=error.fix
        ) from error
