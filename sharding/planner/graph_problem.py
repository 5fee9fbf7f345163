"""A problem with what its nodes and strategies stand for: the arrays and ops of a program, and their shardings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..graph import Annotation, Graph
from ..spec import Dim, Spec
from .partial_choice import joined_edges
from .pinned_costs import pinned_costs
from .problem import FORBIDDEN, Problem
from .value_groups import ValueGroups

MICRO = 1e6
"""Costs are in microseconds, of which solvers take differences."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphProblem:
    """A problem with what its nodes and strategies stand for.

    Example:
        >>> import jax
        >>> from sharding import planner
        >>> x, w = jax.ShapeDtypeStruct((512, 256), "float32"), jax.ShapeDtypeStruct((256, 1024), "float32")
        >>> of = planner.problem_of(lambda x, w: x @ w, x, w, devices="h100:1x8", mesh={"x": 8})
        >>> of.problem.num_nodes, str(of.spec(0, 1)), of.is_op(3)
        (4, '[x, -]', True)
    """

    graph: Graph
    problem: Problem
    groups: ValueGroups
    axes: tuple[str, ...]
    shardings: tuple[np.ndarray, ...]
    """Per node int8 [strategies, axes]: the dim of a group, or the factor of an op, that each axis shards."""
    nodes: Mapping[int, int]
    """Group -> node."""
    node_moves: tuple[np.ndarray, ...]
    """Per node float64 [2, strategies]: seconds of the collectives of arguments, such as parameters with their
    gradients, and bytes that all collectives put on the wire."""
    edge_moves: tuple[np.ndarray, ...]
    """The same per edge, float64 [2, strategies of the first, of the second]."""

    def weighed(self, *, hidden: float = 0.0, price: float = 0.0) -> GraphProblem:
        """The problem with other costs of its collectives.

        Args:
            hidden: the part of the collectives of arguments that computation hides.
            price: seconds that each byte on the wire counts beyond its time.
        """

        def weighed(costs: np.ndarray, moves: np.ndarray) -> np.ndarray:
            return np.where(costs < FORBIDDEN, costs + MICRO * (price * moves[1] - hidden * moves[0]), costs)

        problem = dataclasses.replace(
            self.problem,
            costs=tuple(map(weighed, self.problem.costs, self.node_moves)),
            edge_costs=tuple(map(weighed, self.problem.edge_costs, self.edge_moves)),
        )
        return dataclasses.replace(self, problem=problem)

    def pinned(self, annotations: Mapping[int, Annotation]) -> GraphProblem:
        """The problem with other shardings of some values forbidden."""
        costs = list(self.problem.costs)
        for v, annotation in annotations.items():
            node = self.node_of_value(v)
            if node >= 0:
                costs[node] = pinned_costs(costs[node], self.shardings[node], self.axes, annotation)
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, costs=tuple(costs)))

    def node_of_value(self, v: int) -> int:
        """The node that decides a value's sharding; -1 for scalars and constants."""
        group = self.groups.of(v)
        return -1 if group is None else self.nodes[self.groups.tied[group]]

    def is_op(self, node: int) -> bool:
        """Whether a node is an op, not a group of values."""
        return node not in self._groups_of

    def sharding(self, v: int, choice: Sequence[int] | np.ndarray) -> Spec | None:
        """The spec of a value under a choice; None for scalars and constants."""
        node = self.node_of_value(v)
        return None if node < 0 else self.spec(node, int(choice[node]))

    def spec(self, node: int, strategy: int) -> Spec:
        """The spec that a strategy of a group stands for."""
        if (node, strategy) not in self._specs:
            row = self.shardings[node][strategy]
            ndim = len(self.groups.shape(self.group_of(node)))
            dims = (tuple(a for a, d in zip(self.axes, row, strict=True) if d == dim) for dim in range(ndim))
            self._specs[node, strategy] = Spec(dims=tuple(Dim(axes=axes) for axes in dims))
        return self._specs[node, strategy]

    def group_of(self, node: int) -> int:
        """The first group of a node."""
        return self._groups_of[node]

    @cached_property
    def neighbours(self) -> list[list[tuple[int, np.ndarray, bool]]]:
        """The edges of each node, as `partial_choice.joined_edges` has them."""
        return joined_edges(self.problem)

    @cached_property
    def _specs(self) -> dict[tuple[int, int], Spec]:
        return {}

    @cached_property
    def _groups_of(self) -> dict[int, int]:
        return {node: group for group, node in self.nodes.items()}
