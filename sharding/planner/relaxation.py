"""AutoParallel's linear program: the integer program without integrality, and a rounding where it is fractional."""

from __future__ import annotations

import math
import time

import numpy as np

from .linear_program import build, largest, minimise
from .problem import Problem
from .solution import Solution, nothing_found


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """The solution of the linear relaxation, exact where that is integral, as it mostly is without a memory limit.

    A fractional one is rounded: the nodes whose largest variable is at least 1/2 keep that strategy, and HiGHS's branch
    and cut decides the rest. `seed` has no effect.

    Raises:
        ShardingError: nothing fits, or none was found in time.

    References:
        meta-pytorch/autoparallel, `optimize_sharding.py`, solves the same program over (op, argument) pairs.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    program = build(problem)
    result = minimise(program, num_integers=0, seconds=seconds)
    if result.x is None:
        raise nothing_found(problem, "autoparallel", is_proven=result.status == 2)
    bound = float(result.fun) if result.status == 0 else -math.inf
    size = int(problem.num_strategies.sum())
    values, choice = result.x[:size], largest(problem, result.x)
    if not problem.is_feasible(choice) or problem.cost(choice) > bound + 1e-6 * abs(bound):
        fixed = program.upper.copy()
        nodes = np.repeat(np.arange(problem.num_nodes), problem.num_strategies)
        sure = np.bincount(nodes, values > 0.5, problem.num_nodes) > 0
        fixed[:size][sure[nodes] & (values <= 0.5)] = 0.0
        left = seconds - (time.monotonic() - start)
        for upper in (fixed, program.upper):
            rounded = minimise(program._replace(upper=upper), num_integers=size, seconds=left)
            if rounded.x is not None and problem.is_feasible(largest(problem, rounded.x)):
                break
        else:
            raise nothing_found(problem, "autoparallel", is_proven=rounded.status == 2)
        choice = largest(problem, rounded.x)
    return Solution(
        problem=problem,
        choice=choice,
        algorithm="autoparallel",
        bound=min(bound, problem.cost(choice)),
        evaluations=int(result.get("mip_node_count") or 0),
        seconds=time.monotonic() - start,
    )
