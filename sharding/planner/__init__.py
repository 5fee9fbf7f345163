"""Search for parallel plans: a mesh and annotations with which a step is fast, within a memory limit.

In: a step with its arguments and devices. Out: a `Plan`, by `sharding.plan`. Beneath: a `Problem`, built from a
program, from lists by `Problem.of`, or read from a file; and a `Solution`, by one of many solvers with one signature.

Example:
    >>> from sharding import planner
    >>> costs, usages = [[0, 3], [2, 0]], [[8, 4], [8, 4]]
    >>> problem = planner.Problem.of(costs, [(0, 1, [[0, 5], [5, 0]])], usages=usages, memory_bytes=12)
    >>> solution = planner.solve(problem)
    >>> solution.choice.tolist(), solution.cost, solution.peak_bytes, solution.is_proven
    ([1, 1], 3.0, 8.0, True)
"""

from .algorithm_comparison import AlgorithmComparison, compare
from .algorithms import ALGORITHMS, Solver, solve
from .graph_problem import GraphProblem
from .memory_curve import MemoryCurve, memory_curve
from .parallel_plan import Plan
from .pareto_frontier import Point, frontier
from .plan_search import problem_of
from .plan_stages import Staged, Stages
from .problem import FORBIDDEN, Problem
from .problem_builder import of_graph
from .problem_file import read
from .solution import Solution

__all__ = [
    "ALGORITHMS",
    "FORBIDDEN",
    "AlgorithmComparison",
    "GraphProblem",
    "MemoryCurve",
    "Plan",
    "Point",
    "Problem",
    "Solution",
    "Solver",
    "Staged",
    "Stages",
    "compare",
    "frontier",
    "memory_curve",
    "of_graph",
    "problem_of",
    "read",
    "solve",
]
