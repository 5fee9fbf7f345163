"""One mesh axis after the other: the strategies that are left in each round of searches that recurse over the mesh."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Problem


def num_rounds(problem: Problem) -> int:
    """One per mesh axis; one if the problem doesn't say what axes shard."""
    return max(1, problem.splits[0].shape[1]) if problem.splits else 1


def allowed(problem: Problem, axis: int, choice: np.ndarray | None) -> list[np.ndarray]:
    """Per node, the strategies that shard as chosen on earlier axes and nothing on later ones.

    Nodes without such a strategy may shard what they like on later axes.

    Args:
        problem: with `splits`; else all strategies are allowed.
        axis: of the mesh, by index; the round.
        choice: of the round before.
    """
    if not problem.splits:
        return [np.arange(count) for count in problem.num_strategies]
    found = []
    for i, split in enumerate(problem.splits):
        chosen = split[0] if choice is None else split[choice[i]]
        is_equal = (split[:, :axis] == chosen[:axis]).all(axis=1)
        is_final = (split[:, axis + 1 :] < 0).all(axis=1)
        found.append(np.flatnonzero(is_equal & is_final if (is_equal & is_final).any() else is_equal))
    return found


def restricted(problem: Problem, strategies: Sequence[np.ndarray]) -> Problem:
    """The problem in which each node has only some of its strategies."""
    known: dict[tuple[int, bytes, bytes], np.ndarray] = {}
    edges = []
    for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
        key = id(matrix), strategies[i].tobytes(), strategies[j].tobytes()
        if key not in known:
            known[key] = matrix[np.ix_(strategies[i], strategies[j])]
        edges.append((i, j, known[key]))
    return Problem.of(
        [cost[own] for cost, own in zip(problem.costs, strategies, strict=True)],
        edges,
        usages=[usage[own] for usage, own in zip(problem.usages, strategies, strict=True)],
        intervals=problem.intervals,
        memory_bytes=problem.memory_bytes,
        name=problem.name,
    )
