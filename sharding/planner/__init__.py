"""Search for parallel plans: one strategy per node, at least cost, within a memory limit at every time.

In: a `Problem`, built by `Problem.of` or read from a file. Out: a `Solution`, by one of many solvers with one
signature.

Example:
    >>> from sharding import planner
    >>> costs, usages = [[0, 3], [2, 0]], [[8, 4], [8, 4]]
    >>> problem = planner.Problem.of(costs, [(0, 1, [[0, 5], [5, 0]])], usages=usages, memory_bytes=12)
    >>> solution = planner.solve(problem)
    >>> solution.choice.tolist(), solution.cost, solution.peak_bytes, solution.is_proven
    ([1, 1], 3.0, 8.0, True)
"""

from .algorithms import ALGORITHMS, Solver, solve
from .graph_problem import GraphProblem, of_graph
from .pareto_frontier import Point, frontier
from .plan import Plan
from .plan_search import plan
from .problem import FORBIDDEN, Problem
from .problem_file import read
from .solution import Solution

__all__ = [
    "ALGORITHMS",
    "FORBIDDEN",
    "GraphProblem",
    "Plan",
    "Point",
    "Problem",
    "Solution",
    "Solver",
    "frontier",
    "of_graph",
    "plan",
    "read",
    "solve",
]
