"""MindSpore's double recursion: for each mesh axis, node by node from the most important one, what costs least now."""

from __future__ import annotations

import math
import time

import numpy as np

from .mesh_axes import allowed, num_rounds
from .partial_choice import PartialChoice
from .problem import Problem
from .solution import Solution, nothing_found


def solve(problem: Problem, *, memory_bytes: float | None = None, seconds: float = 60, seed: int = 0) -> Solution:
    """A plan by one greedy pass over the nodes per mesh axis; linear in nodes and edges, for a start or a comparison.

    In a round each node has the strategies that shard as decided on earlier axes and nothing on later ones
    (`Problem.splits`; one round without them). Nodes are in the order of importance, by how much their worst strategy
    costs more than their best. Each takes what costs least with its edges to nodes decided in this round,
    unless that leaves another node without an option. In the last round what exceeds the memory limit is none, and a
    node that has no other may change earlier axes. `seconds` and `seed` have no effect.

    Raises:
        ShardingError: nothing fits, or earlier decisions leave a node no strategy.

    References:
        Wang et al., "Efficient and Systematic Partitioning of Large and Deep Neural Networks for Parallelization",
        Euro-Par 2021, section 4; MindSpore's `recursive_programming`. Deviation: costs are the problem's.
    """
    problem, start = problem.limited(memory_bytes), time.monotonic()
    rounds, choice, evaluations = num_rounds(problem), None, 0
    for axis in range(rounds):
        is_last = axis == rounds - 1
        partial = PartialChoice(problem if is_last else problem.limited(math.inf))
        strategies = allowed(problem, axis, choice)
        evaluations += sum(map(len, strategies))
        partial = _decided(partial, strategies)
        choice = partial.choice
        if partial.is_dead:
            raise nothing_found(problem, "mindspore", is_proven=False, fix='algorithm="auto"')
    assert choice is not None  # there is at least one round
    if not problem.is_feasible(choice):
        raise nothing_found(problem, "mindspore", is_proven=False, fix='algorithm="auto"')
    return Solution(
        problem=problem,
        choice=choice,
        algorithm="mindspore",
        bound=-math.inf,
        evaluations=evaluations,
        seconds=time.monotonic() - start,
    )


def _decided(partial: PartialChoice, strategies: list[np.ndarray]) -> PartialChoice:
    """All nodes decided, the most important one first."""
    partial.force(range(len(strategies)))
    for node in np.argsort([-_importance(partial, i, own) for i, own in enumerate(strategies)], kind="stable").tolist():
        if partial.is_dead or partial.choice[node] >= 0:
            continue
        options = partial.options(node)
        is_other = ~np.isin(options, strategies[node])
        for place in np.lexsort((partial.local[partial.offsets[node] + options], is_other)).tolist():
            following = partial.forced(node, int(options[place]))
            if not following.is_dead:
                partial = following
                break
        else:
            partial.cost = math.inf
    return partial


def _importance(partial: PartialChoice, node: int, strategies: np.ndarray) -> float:
    """By how much the worst strategy of a node costs more than the best."""
    costs = partial.local[partial.offsets[node] + strategies]
    finite = costs[np.isfinite(costs)]
    return float(np.ptp(finite)) if finite.size else math.inf
