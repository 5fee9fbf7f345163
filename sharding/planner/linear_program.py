"""Alpa's integer program, and its linear relaxation.

Variables: `s[i, p]`, whether node i takes strategy p, and `e[k, p, q]`, whether edge k's nodes take p and q.

    minimise    sum costs[i, p] s[i, p] + sum edge_costs[k, p, q] e[k, p, q]        (_objective)
    subject to  sum_p s[i, p] = 1                                     every node    (_one_strategy)
                sum_q e[k, p, q] = s[i, p], sum_p e[k, p, q] = s[j, q] every edge   (_marginals)
                sum over alive i of usages[i, p] s[i, p] <= memory_bytes every time (_memory)
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np

from .problem import FORBIDDEN, Problem
from .solution import Solution, nothing_found


class Program(NamedTuple):
    """The matrices of `scipy.optimize.milp`."""

    objective: np.ndarray
    upper: np.ndarray
    """Of each variable: 0 where it is forbidden, else 1."""
    equal: Any
    """Sparse rows of the equations."""
    right: np.ndarray
    memory: Any
    """Sparse rows of usages beyond each node's smallest, one per time."""
    limit: np.ndarray
    """Of the rows of memory."""


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """The cheapest choice, by HiGHS's branch and cut on Alpa's integer program.

    Exact if it ends in time, else the best choice so far with a bound. `seed` has no effect.

    Raises:
        ShardingError: nothing fits, or none was found in time.

    References:
        Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022,
        section 4.2. Deviation: edges' sums equal the nodes' variables, which is the same polytope as Alpa's
    inequalities."""
    problem, start = problem.limited(memory_bytes), time.monotonic()
    result = minimise(build(problem), num_integers=int(problem.num_strategies.sum()), seconds=seconds)
    choice = None if result.x is None else largest(problem, result.x)
    if choice is None or not problem.is_feasible(choice):
        raise nothing_found(problem, "alpa", is_proven=result.status == 2)
    bound = -math.inf if result.mip_dual_bound is None else float(result.mip_dual_bound)
    return Solution(
        problem=problem,
        choice=choice,
        algorithm="alpa",
        bound=problem.cost(choice) if result.status == 0 else bound,
        evaluations=int(result.mip_node_count or 0),
        seconds=time.monotonic() - start,
    )


def build(problem: Problem) -> Program:
    """The program's matrices."""
    import scipy.sparse

    objective = _objective(problem)
    upper = np.where(objective >= FORBIDDEN, 0.0, 1.0)
    parts: list[Any] = [_one_strategy(problem), *_marginals(problem)]
    equal: Any = scipy.sparse.vstack([scipy.sparse.csr_array(part) for part in parts]).tocsr()
    memory, limit = _memory(problem)
    padding = scipy.sparse.csr_array((memory.shape[0], len(objective) - memory.shape[1]))
    return Program(
        objective=np.where(upper > 0, objective, 0.0),
        upper=upper,
        equal=equal,
        right=np.repeat([1.0, 0.0], [problem.num_nodes, equal.shape[0] - problem.num_nodes]),
        memory=scipy.sparse.hstack([memory, padding]).tocsr(),
        limit=limit,
    )


def minimise(program: Program, *, num_integers: int, seconds: float) -> Any:
    """HiGHS's result; the first `num_integers` variables are whole numbers."""
    from scipy.optimize import milp

    integrality = (np.arange(len(program.objective)) < num_integers).astype(int)
    constraints: list[Any] = [(program.equal, program.right, program.right)]
    if program.memory.shape[0]:
        constraints.append((program.memory, -np.inf, program.limit))
    return milp(
        program.objective,
        integrality=integrality,
        bounds=(0, program.upper),
        constraints=constraints,
        options={"time_limit": max(0.1, seconds), "mip_rel_gap": 0.0},
    )


def largest(problem: Problem, values: np.ndarray) -> np.ndarray:
    """Per node, the strategy with the largest value."""
    offsets = problem.flat.offsets
    return np.array([values[a:b].argmax() for a, b in zip(offsets[:-1], offsets[1:], strict=True)], np.int64)


def _objective(problem: Problem) -> np.ndarray:
    return np.concatenate([*problem.costs, *(matrix.ravel() for matrix in problem.edge_costs)])


def _one_strategy(problem: Problem) -> Any:
    import scipy.sparse

    nodes = np.repeat(np.arange(problem.num_nodes), problem.num_strategies)
    entries = sum(matrix.size for matrix in problem.edge_costs)
    shape = problem.num_nodes, len(nodes) + entries
    return scipy.sparse.csr_array((np.ones(len(nodes)), (nodes, np.arange(len(nodes)))), shape=shape)


def _marginals(problem: Problem) -> list[Any]:
    """Rows `sum_q e[k, p, q] - s[i, p]` and `sum_p e[k, p, q] - s[j, q]`."""
    import scipy.sparse

    offsets = problem.flat.offsets
    starts = offsets[-1] + np.cumsum([0, *(matrix.size for matrix in problem.edge_costs)])
    found = []
    for side in (0, 1):
        counts = problem.num_strategies[problem.edges[:, side]]
        first = np.cumsum([0, *counts])
        own = [
            start + np.arange(m.size).reshape(m.shape) for start, m in zip(starts[:-1], problem.edge_costs, strict=True)
        ]
        rows = [(f + np.indices(entries.shape)[side]).ravel() for f, entries in zip(first[:-1], own, strict=True)]
        nodes = [offsets[i] + np.arange(c) for i, c in zip(problem.edges[:, side], counts, strict=True)]
        row = np.concatenate([np.zeros(0), *rows, np.arange(first[-1])]).astype(np.int64)
        column = np.concatenate([np.zeros(0), *(entries.ravel() for entries in own), *nodes]).astype(np.int64)
        value = np.repeat([1.0, -1.0], [starts[-1] - offsets[-1], first[-1]])
        found.append(scipy.sparse.csr_array((value, (row, column)), shape=(first[-1], starts[-1])))
    return found


def _memory(problem: Problem) -> tuple[Any, np.ndarray]:
    """Usages beyond the smallest at the times where some choice exceeds the limit, and what the smallest leave."""
    import scipy.sparse

    smallest = [int(np.argmin(usage)) for usage in problem.usages]
    times = np.flatnonzero(problem.is_tight)
    limit = problem.memory_bytes - problem.memory_over_time(smallest)[times]
    rows, columns, values = [], [], []
    for i, (first, end) in enumerate(np.searchsorted(times, problem.spans).tolist()):
        more = problem.usages[i] - problem.usages[i].min()
        (used,) = more.nonzero()
        rows.append(np.repeat(np.arange(first, end), len(used)))
        columns.append(np.tile(problem.flat.offsets[i] + used, end - first))
        values.append(np.tile(more[used], end - first))
    index = (
        np.concatenate([np.zeros(0), *rows]).astype(np.int64),
        np.concatenate([np.zeros(0), *columns]).astype(np.int64),
    )
    shape = len(times), int(problem.flat.offsets[-1])
    return scipy.sparse.csr_array((np.concatenate([np.zeros(0), *values]), index), shape=shape), limit
