"""Nodes that are equal with their surroundings, as those of repeated layers are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .partial_choice import joined_edges
from .problem import Problem

RADIUS = 2
"""Edges up to which surroundings must be equal; nodes near the ends of a model differ."""


def equal_nodes(problem: Problem, radius: int = RADIUS) -> list[list[int]]:
    """Groups of nodes with equal strategies and equal surroundings; most problems have groups of one node, too.

    Equal are costs, bytes and splits, and within `radius` edges those of the neighbours, with equal edges to them (the
    colour refinement of Weisfeiler and Leman).

    Example:
        >>> equal_nodes(Problem.of([[1, 2], [3, 4], [1, 2]], [(0, 1, np.eye(2)), (2, 1, np.eye(2))]))
        [[0, 2], [1]]
    """
    splits = problem.splits or [np.zeros(0)] * problem.num_nodes
    own = zip(problem.costs, problem.usages, splits, strict=True)
    colours = numbered([(cost.tobytes(), usage.tobytes(), split.tobytes()) for cost, usage, split in own])
    edges = [[(j, np.ascontiguousarray(matrix).tobytes()) for j, matrix, _ in row] for row in joined_edges(problem)]
    for _ in range(radius):
        colours = numbered(
            [(colours[i], *sorted((colours[j], matrix) for j, matrix in row)) for i, row in enumerate(edges)]
        )
    groups: dict[int, list[int]] = {}
    for node, colour in enumerate(colours):
        groups.setdefault(colour, []).append(node)
    return list(groups.values())


def numbered(keys: Sequence[Hashable]) -> list[int]:
    """The number of each key's first occurrence among distinct ones."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
