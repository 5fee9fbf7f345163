"""`ALGORITHMS`, the table of solvers, and `solve`, which picks one by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Protocol

from ..errors import ShardingError
from . import (
    axis_recursion,
    chain_memory,
    double_recursion,
    elimination,
    exhaustive,
    lagrangian,
    linear_program,
    markov_chain,
    pareto_frontier,
    policy_gradient,
    q_learning,
    relaxation,
    tree_search,
)
from .problem import Problem
from .solution import Solution


class Solver(Protocol):
    """What every solver's `solve` is.

    Args:
        problem: what to solve.
        memory_bytes: the limit; None is the problem's own, inf removes it.
        seconds: after which the best choice so far is returned; a Ctrl-C does the same.
        seed: of random decisions. Equal seeds give equal choices unless time ends the search.

    Raises:
        ShardingError: the limit is below every choice's peak, or no choice was found.

    Example:
        >>> from sharding import planner
        >>> def cheapest(solver: planner.Solver, problem: planner.Problem) -> float:
        ...     return solver(problem, seconds=5).cost
        >>> cheapest(planner.ALGORITHMS["optcnn"], planner.Problem.of([[3, 1]]))
        1.0
    """

    def __call__(
        self, problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0
    ) -> Solution: ...


ALGORITHMS: Mapping[str, Solver] = {
    "alpa": linear_program.solve,
    "automap": tree_search.solve,
    "autoparallel": relaxation.solve,
    "dqn": q_learning.solve,
    "exhaustive": exhaustive.solve,
    "flexflow": markov_chain.solve,
    "galvatron": chain_memory.solve,
    "lagrangian": lagrangian.solve,
    "mindspore": double_recursion.solve,
    "optcnn": elimination.solve,
    "reinforce": policy_gradient.solve,
    "tensoropt": pareto_frontier.solve,
    "tofu": axis_recursion.solve,
}
"""Solvers by the name of the system that published them. `dqn` is Auto-MAP's, not to be confused with Automap;
`reinforce` is that of Mirhoseini et al.; `lagrangian` is our own, and what "auto" takes."""


def solve(
    problem: Problem,
    algorithm: str = "auto",
    memory_bytes: float | None = None,
    seconds: float = 60,
    seed: int = 0,
) -> Solution:
    """A cheap choice of strategies within a memory limit.

    Args:
        problem: what to solve.
        algorithm: a key of `ALGORITHMS`, or "auto".
        memory_bytes: the limit; None is the problem's own, inf removes it.
        seconds: after which the best choice so far is returned; a Ctrl-C does the same.
        seed: of random decisions. Equal seeds give equal choices unless time ends the search.

    Raises:
        ShardingError: the algorithm is unknown, the limit is below every choice's peak, or no choice was found.

    Example:
        >>> problem = Problem.of([[0, 3], [2, 0]], [(0, 1, [[0, 5], [5, 0]])], usages=[[8, 4], [8, 4]])
        >>> solution = solve(problem, "exhaustive", memory_bytes=12)
        >>> solution.choice.tolist(), solution.cost, solution.is_proven
        ([1, 1], 3.0, True)
    """
    if not seconds > 0:
        raise ShardingError(f"planner.solve(seconds={seconds})", required="a positive number of seconds")
    check_algorithm(algorithm)
    return ALGORITHMS["lagrangian" if algorithm == "auto" else algorithm](
        problem, memory_bytes=memory_bytes, seconds=seconds, seed=seed
    )


def check_algorithm(algorithm: str) -> None:
    """Refuses unknown algorithms.

    Raises:
        ShardingError: neither a key of `ALGORITHMS` nor "auto".
    """
    if algorithm not in ALGORITHMS and algorithm != "auto":
        near = difflib.get_close_matches(algorithm, ["auto", *ALGORITHMS], n=1, cutoff=0.4)
        raise ShardingError(
            f"planner.solve(algorithm={algorithm!r})",
            found="no such algorithm",
            required=f"auto, {', '.join(sorted(ALGORITHMS))}",
            fix=[f"did you mean {name!r}?" for name in near],
        )
