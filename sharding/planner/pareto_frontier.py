"""TensorOpt's frontier: for each peak memory, the least cost.

Table entries are sets of (cost, memory at each time) of which none is dominated. Nodes are eliminated one by one: sets
of joined tables are added up pairwise, sets of the eliminated node's strategies are united, and dominated members
dropped."""

from __future__ import annotations

import itertools
import math
import time
from typing import NamedTuple

import numpy as np

from ..errors import ShardingError
from .problem import FORBIDDEN, Problem
from .solution import Solution, nothing_found

MOST_POINTS = 20_000
"""Members of one set, before dominated ones are dropped; and entries of a table."""


class Point(NamedTuple):
    """A choice with which no other one is better in both cost and peak."""

    peak_bytes: float
    cost: float
    choice: np.ndarray


class _Set(NamedTuple):
    """Costs and memory, [members, 1 + times], and the strategies of eliminated nodes, [members, nodes]."""

    values: np.ndarray
    choices: np.ndarray


def frontier(problem: Problem) -> list[Point]:
    """The choices that are best for some memory limit, those with the largest peak and the least cost first.

    Exact. The problem's own limit is kept: points above it are left out.

    Raises:
        ShardingError: nothing fits, or the sets become too large.

    References:
        Cai et al., "TensorOpt: Exploring the Tradeoffs in Distributed DNN Training with Auto-Parallelism", TPDS 2022.
        Deviation: memory is a vector over time, and nodes of any degree are eliminated, so that nothing is approximate.

    Example:
        >>> problem = Problem.of([[0, 3], [2, 0]], [(0, 1, [[0, 5], [5, 0]])], usages=[[8, 4], [8, 2]])
        >>> [(point.peak_bytes, point.cost) for point in frontier(problem)]
        [(16.0, 2.0), (6.0, 3.0)]
    """
    problem = problem.limited(None)
    whole = _eliminated(problem)
    peaks = whole.values[:, 1:].max(axis=1, initial=0.0)
    points: list[Point] = []
    for k in np.lexsort((peaks, whole.values[:, 0])).tolist():
        if not points or peaks[k] < points[-1].peak_bytes:
            points.append(Point(float(peaks[k]), float(whole.values[k, 0]), whole.choices[k]))
    if not points:
        raise nothing_found(problem, "tensoropt", is_proven=True)
    return points


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """The fastest point of the frontier within the limit. Exact; `seconds` and `seed` have no effect.

    Raises:
        ShardingError: nothing fits, or the frontier's sets become too large.

    References:
        Cai et al., "TensorOpt", TPDS 2022; see `planner.frontier`.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    points = frontier(problem)
    return Solution(
        problem=problem,
        choice=points[0].choice,
        algorithm="tensoropt",
        bound=points[0].cost,
        evaluations=len(points),
        seconds=time.monotonic() - start,
    )


def _eliminated(problem: Problem) -> _Set:
    """The set of the whole problem."""
    n, times = problem.num_nodes, len(problem.times)
    tables: list[tuple[tuple[int, ...], Table]] = [((i,), _node_table(problem, i)) for i in range(n)]
    tables += [
        (tuple(edge), _edge_table(matrix, n, times))
        for edge, matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True)
    ]
    left = set(range(n))
    while left:
        sizes = {i: _table_size(problem, tables, i) for i in left}
        node = min(left, key=lambda i: (sizes[i], i))
        _check_size(problem, sizes[node])
        own = [table for table in tables if node in table[0]]
        tables = [table for table in tables if node not in table[0]]
        tables.append(_without(problem, node, own))
        left.remove(node)
    whole = _Set(np.zeros((1, 1 + times)), np.zeros((1, n), np.int64))
    for _, table in tables:
        whole = _reduced(problem, _sums(problem, whole, table[()]))
    return whole


Table = dict[tuple[int, ...], _Set]


def _node_table(problem: Problem, node: int) -> Table:
    table: Table = {}
    for p, (cost, usage) in enumerate(zip(problem.costs[node], problem.usages[node], strict=True)):
        values = np.zeros((1, 1 + len(problem.times)))
        first, end = problem.spans[node]
        values[0, 0], values[0, 1 + first : 1 + end] = cost, usage
        choice = np.zeros((1, problem.num_nodes), np.int64)
        choice[0, node] = p
        table[(p,)] = _Set(values, choice)
    return table


def _edge_table(matrix: np.ndarray, num_nodes: int, times: int) -> Table:
    table: Table = {}
    for p, q in itertools.product(*map(range, matrix.shape)):
        values = np.zeros((1, 1 + times))
        values[0, 0] = matrix[p, q]
        table[(p, q)] = _Set(values, np.zeros((1, num_nodes), np.int64))
    return table


def _scope(tables: list[tuple[tuple[int, ...], Table]], node: int) -> list[int]:
    return sorted({i for scope, _ in tables if node in scope for i in scope} - {node})


def _table_size(problem: Problem, tables: list[tuple[tuple[int, ...], Table]], node: int) -> int:
    return math.prod(int(problem.num_strategies[i]) for i in (node, *_scope(tables, node)))


def _without(problem: Problem, node: int, tables: list[tuple[tuple[int, ...], Table]]) -> tuple[tuple[int, ...], Table]:
    """The table over a node's neighbours that replaces it."""
    scope = _scope(tables, node)
    result: Table = {}
    for key in itertools.product(*(range(problem.num_strategies[i]) for i in scope)):
        given = dict(zip(scope, key, strict=True))
        united: list[_Set] = []
        for p in range(problem.num_strategies[node]):
            given[node] = p
            joined = None
            for own, table in tables:
                one = table[tuple(given[i] for i in own)]
                joined = one if joined is None else _reduced(problem, _sums(problem, joined, one))
            assert joined is not None
            united.append(joined)
        values, choices = (np.concatenate(arrays) for arrays in zip(*united, strict=True))
        result[key] = _reduced(problem, _Set(values, choices))
    return tuple(scope), result


def _sums(problem: Problem, one: _Set, other: _Set) -> _Set:
    """All pairwise sums; each node's strategy is in one of both sets, and 0 in the other."""
    _check_size(problem, len(one.values) * len(other.values))
    values = one.values[:, None] + other.values[None]
    choices = one.choices[:, None] + other.choices[None]
    return _Set(values.reshape(-1, values.shape[-1]), choices.reshape(-1, choices.shape[-1]))


def _reduced(problem: Problem, members: _Set) -> _Set:
    """Without members that are forbidden, exceed the limit, or are dominated in cost and memory at every time."""
    fits = (members.values[:, 0] < FORBIDDEN) & (members.values[:, 1:] <= problem.memory_bytes).all(axis=1)
    values, choices = np.unique(members.values[fits], axis=0, return_index=True)
    choices = members.choices[fits][choices]
    kept: list[int] = []
    # In ascending order, only an earlier member dominates a later one.
    for k in range(len(values)):
        if not (values[kept] <= values[k]).all(axis=1).any():
            kept.append(k)
    return _Set(values[kept], choices[kept])


def _check_size(problem: Problem, size: int) -> None:
    if size > MOST_POINTS:
        required = f"at most {MOST_POINTS:,} in one table"
        raise ShardingError(
            f"planner.frontier({problem!r})", found=f"{size:,} points", required=required, fix="planner.solve"
        )
