"""Galvatron's dynamic program: layer by layer along a chain, with the memory in use as a dimension of the table."""

from __future__ import annotations

import math
import time

import numpy as np

from ..errors import ShardingError
from .partial_choice import joined_edges
from .problem import FORBIDDEN, Problem
from .solution import Solution, nothing_found

MEMORY_UNITS = 2_000
"""Into which the limit is divided, unless a larger unit divides all bytes."""


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """The cheapest choice for a chain whose memory is a sum over layers, as that of parameters is.

    With o the memory of a layer above its smallest, in units that are rounded up:

        C(l, e, s) = min over s' of C(l - 1, e - o(l, s), s') + cost(l, s) + edge cost(s', s)

    Exact if a unit divides all bytes, else never above the limit but perhaps not the cheapest. Takes
    layers strategies^2 units steps; `seconds` and `seed` have no effect.

    Raises:
        ShardingError: the problem is no chain, its limit binds at different times, or nothing fits.

    References:
        Miao et al., "Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism", VLDB
        2023 (2211.13878), section 3.3.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    order, between = _chain(problem)
    extra, room, is_exact = _units(problem)
    table, back = np.zeros((room + 1, 1)), []
    for node, edge in zip(order, between, strict=True):
        cost = np.where(problem.costs[node] >= FORBIDDEN, np.inf, problem.costs[node])
        new = np.full((room + 1, len(cost)), np.inf)
        best = np.zeros(new.shape, np.int64)
        for strategy, units in enumerate(extra[node].tolist()):
            if units > room:
                continue
            ways = table[: room + 1 - units] + edge[:, strategy]
            best[units:, strategy] = ways.argmin(axis=1)
            new[units:, strategy] = ways.min(axis=1) + cost[strategy]
        table = new
        back.append(best)
    choice = np.zeros(problem.num_nodes, np.int64)
    at, strategy = room, int(table[room].argmin())
    least = float(table[room, strategy])
    for node, best in zip(reversed(order), reversed(back), strict=True):
        choice[node] = strategy
        at, strategy = at - int(extra[node][strategy]), int(best[at, strategy])
    if least == math.inf or not problem.is_feasible(choice):
        raise nothing_found(problem, "galvatron", is_proven=is_exact, fix="" if is_exact else 'algorithm="auto"')
    return Solution(
        problem=problem,
        choice=choice,
        algorithm="galvatron",
        bound=problem.cost(choice) if is_exact else -math.inf,
        evaluations=sum(best.size for best in back),
        seconds=time.monotonic() - start,
    )


def _chain(problem: Problem) -> tuple[list[int], list[np.ndarray]]:
    """The nodes of one chain, or of several in a row, and the costs of each node's edge to the one before it."""
    edges = joined_edges(problem)
    order: list[int] = []
    between: list[np.ndarray] = []
    left = set(range(problem.num_nodes))
    for end in range(problem.num_nodes):
        node = end if end in left and len(edges[end]) < 2 else None
        edge = np.zeros((len(problem.costs[order[-1]]) if order else 1, len(problem.costs[end])))
        while node is not None:
            order.append(node)
            between.append(edge)
            left.remove(node)
            ahead = [(j, matrix) for j, matrix, _ in edges[node] if j in left]
            node, edge = ahead[0] if len(ahead) == 1 else (None, edge)
    busiest = max(map(len, edges), default=0)
    if left or busiest > 2:
        raise ShardingError(
            f"galvatron: {problem!r}",
            found=f"a node with {busiest} neighbours" if busiest > 2 else f"a cycle of {len(left)} nodes",
            required="a chain: each node has an edge to the next one at most",
            fix='algorithm="tensoropt", or "auto"',
        )
    return order, between


def _units(problem: Problem) -> tuple[list[np.ndarray], int, bool]:
    """Memory of each node's strategies above its smallest, and what is left for it; and whether nothing was rounded."""
    (tight,) = problem.is_tight.nonzero()
    if not len(tight):
        return [np.zeros(count, np.int64) for count in problem.num_strategies], 0, True
    if len(tight) > 1:
        raise ShardingError(
            f"galvatron: {problem!r}",
            found=f"{len(tight)} times at which different nodes may exceed the limit",
            required="one: the memory of all layers is needed together",
            fix='algorithm="tensoropt", or "auto"',
        )
    smallest = [int(np.argmin(usage)) for usage in problem.usages]
    room = problem.memory_bytes - problem.memory_over_time(smallest)[tight[0]]
    extra = [
        (usage - usage.min()) * (first <= tight[0] < end)
        for usage, (first, end) in zip(problem.usages, problem.spans, strict=True)
    ]
    numbers = np.concatenate(extra)
    is_whole = bool((numbers == np.floor(numbers)).all()) and numbers.max() < 2**53
    unit = float(np.gcd.reduce(numbers.astype(np.int64))) if is_whole else 0.0
    if unit and room / unit <= MEMORY_UNITS:
        return [(own / unit).astype(np.int64) for own in extra], int(room // unit), True
    # Without room only the smallest strategies are left, which no rounding changes.
    unit = room / MEMORY_UNITS or numbers.max()
    return [np.ceil(own / unit).astype(np.int64) for own in extra], MEMORY_UNITS if room else 0, not room
