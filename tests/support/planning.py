"""Random planner problems, and the slow, obvious evaluation of all choices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from sharding.planner import FORBIDDEN, Problem


def random_problem(
    seed: int,
    *,
    nodes: int = 7,
    strategies: int = 4,
    forbidden: float = 0.05,
    refused: float = 0.0,
    limited: bool = True,
) -> Problem:
    """A problem with up to that many nodes and strategies, edges in any direction, some parallel.

    These shares of the pairs of strategies (`forbidden`) and of the strategies (`refused`) are forbidden.
    """
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, nodes + 1))
    sizes = rng.integers(1, strategies + 1, n).tolist()
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j and rng.random() < 2 / n]
    matrices = [rng.integers(0, 20, (sizes[i], sizes[j])).astype(float) for i, j in pairs]
    for matrix in matrices:
        matrix[rng.random(matrix.shape) < forbidden] = FORBIDDEN
    starts = rng.integers(0, 6, n)
    costs = [rng.integers(0, 20, size).astype(float) for size in sizes]
    chance = np.random.default_rng(seed + 1)
    for cost in costs:
        cost[chance.random(len(cost)) < refused] = FORBIDDEN
    problem = Problem.of(
        costs,
        [(i, j, matrix) for (i, j), matrix in zip(pairs, matrices, strict=True)],
        usages=[rng.integers(1, 10, size) for size in sizes],
        intervals=np.stack([starts, starts + rng.integers(0, 5, n)], axis=1),
        name=f"random {seed}",
    )
    limit = max(1.0, problem.least_peak_bytes + int(rng.integers(0, 8)))
    return problem.limited(limit) if limited else problem


def plain_cost(problem: Problem, choice: tuple[int, ...]) -> float:
    """The sum of node and edge costs, one at a time."""
    total = sum(cost[p] for cost, p in zip(problem.costs, choice, strict=True))
    for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        total += matrix[choice[i], choice[j]]
    return float(total)


def plain_peak(problem: Problem, choice: tuple[int, ...]) -> float:
    """The most memory at any time, every time looked at."""
    peak = 0.0
    for time in range(int(problem.intervals.max(initial=0)) + 1):
        alive = [i for i, (first, end) in enumerate(problem.intervals) if first <= time < end]
        peak = max(peak, float(sum(problem.usages[i][choice[i]] for i in alive)))
    return peak


def outcomes(problem: Problem) -> Iterator[tuple[float, float]]:
    """(cost, peak) of every choice that takes nothing forbidden."""
    for choice in itertools.product(*(range(len(cost)) for cost in problem.costs)):
        if (cost := plain_cost(problem, choice)) < FORBIDDEN:
            yield cost, plain_peak(problem, choice)


def least_cost(problem: Problem) -> float:
    """The least cost of all choices within the limit; inf if there is none."""
    return min((cost for cost, peak in outcomes(problem) if peak <= problem.memory_bytes), default=math.inf)


def five_nodes(*, is_chain: bool = False) -> Problem:
    """Five nodes of three strategies, costs and memory by formula: the least cost is 26, or 24 of the chain."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), *([] if is_chain else [(0, 2), (1, 4)])]
    return Problem.of(
        [[(7 * i + 3 * p) % 11 + 1 for p in range(3)] for i in range(5)],
        [
            (i, j, [[0 if p == q else (3 * i + 2 * j + 2 * p + q) % 5 + 1 for q in range(3)] for p in range(3)])
            for i, j in edges
        ],
        usages=[[(5 * i + 4 * p) % 7 + 1 for p in range(3)] for i in range(5)],
        name="chain of five" if is_chain else "five nodes",
    )


def random_axes(seed: int, *, nodes: int = 4, limited: bool = False) -> Problem:
    """A problem on two mesh axes: each node shards none or one of two factors over each of them."""
    rng = np.random.default_rng(seed)
    splits = list(itertools.product((-1, 0, 1), repeat=2))
    size = len(splits)
    edges = [(i, i + 1, rng.integers(0, 20, (size, size))) for i in range(nodes - 1)]
    problem = Problem.of(
        rng.integers(0, 20, (nodes, size)),
        edges,
        usages=[[8 >> sum(factor >= 0 for factor in split) for split in splits]] * nodes,
        splits=[splits] * nodes,
        name=f"axes {seed}",
    )
    return problem.limited(problem.least_peak_bytes + 2) if limited else problem


def two_matmuls(rows: int, *, rounds: int = 3) -> tuple[Problem, list[tuple[int, ...]]]:
    """Two matmuls (rows x 1024 x 4096, rows x 4096 x 1024) on axes of two devices, and the strategies of both.

    A strategy says which of rows, contracted and columns each axis halves (0, 1, 2). Halving costs the elements of the
    array without that dim; sharding the array between them differently costs 16 of its elements; both at the sizes
    that earlier axes leave. Not halving costs more than anything else.
    """
    shapes = [(rows, 1024, 4096), (rows, 4096, 1024)]
    strategies = list(itertools.product((0, 1, 2, -1), repeat=rounds))

    def local(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[float]:
        return [size / 2 ** axes.count(dim) for dim, size in enumerate(shape)]

    def cost(shape: tuple[int, ...], axes: tuple[int, ...]) -> float:
        sizes = [local(shape, axes[:r]) for r in range(rounds)]
        return sum(1e15 if dim < 0 else math.prod(size) / size[dim] for dim, size in zip(axes, sizes, strict=True))

    def reshard(first: tuple[int, ...], second: tuple[int, ...]) -> float:
        between = [({0: 0, 2: 1}.get(p), {0: 0, 1: 1}.get(q)) for p, q in zip(first, second, strict=True)]
        sizes = [local(shapes[0], first[:r]) for r in range(rounds)]
        return sum(16 * size[0] * size[2] for (p, q), size in zip(between, sizes, strict=True) if p != q)

    edge = [[reshard(p, q) for q in strategies] for p in strategies]
    costs = [[cost(shape, axes) for axes in strategies] for shape in shapes]
    return Problem.of(costs, [(0, 1, edge)], splits=[strategies] * 2), strategies
