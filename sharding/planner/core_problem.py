"""`Core`: what is left of a problem after its reductions, as arrays for all nodes at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .forests import Arcs
from .live_memory import LiveMemory
from .problem import FORBIDDEN, Problem
from .problem_reduction import Part, Reduction


@dataclass(frozen=True, kw_only=True, eq=False)
class Core:
    """A reduced problem and the way back."""

    reduction: Reduction
    problem: Problem
    """Its nodes and edges without memory, numbered from 0."""
    nodes: list[int]
    """Their numbers in the reduction."""
    memory: LiveMemory
    arcs: Arcs
    soft: np.ndarray
    """Costs of all strategies, end to end, with `barrier` in place of what is forbidden, as in `arcs`."""
    barrier: float

    @classmethod
    def of(cls, reduction: Reduction, until: float = math.inf) -> Core:
        """Reduces until nothing changes, or until a time of `time.monotonic`, and numbers what is left."""
        reduction.run(until)
        nodes = list(reduction.costs)
        number = {node: k for k, node in enumerate(nodes)}
        triples = [(number[i], number[j], m) for i in nodes for j, m in reduction.edges[i].items() if i < j]
        costs = list(reduction.costs.values())
        # Differences of costs must stay exact, which those with 1e18 are not.
        finite = [values[values < FORBIDDEN] for values in (*costs, *(m for _, _, m in triples))]
        barrier = min(FORBIDDEN, 1e3 * max((float(np.abs(v).max(initial=1.0)) for v in finite), default=1.0))
        problem = Problem.of(costs, triples)
        soft = Problem.of(
            [np.minimum(c, barrier) for c in costs], [(i, j, np.minimum(m, barrier)) for i, j, m in triples]
        )
        memory = LiveMemory.of([reduction.parts[i] for i in nodes], problem.flat.offsets, reduction.limit)
        return cls(
            reduction=reduction,
            problem=problem,
            nodes=nodes,
            memory=memory,
            arcs=Arcs.of(soft),
            soft=soft.flat.costs,
            barrier=barrier,
        )

    @property
    def constant(self) -> float:
        """What the nodes that are gone cost."""
        return self.reduction.constant

    def cost(self, choice: np.ndarray) -> float:
        """The whole problem's cost of a choice of the core."""
        return self.problem.cost(choice) + self.constant

    def excess(self, choice: np.ndarray) -> np.ndarray:
        """Bytes above the limit at each time, negative below it."""
        return self.memory.used(choice) - self.memory.limit

    def restore(self, choice: np.ndarray) -> np.ndarray:
        """The whole problem's choice."""
        return self.reduction.restore(dict(zip(self.nodes, choice.tolist(), strict=True)))

    def restricted(self, allowed: list[np.ndarray]) -> Core:
        """The core in which each node takes one of its allowed strategies, reduced again."""
        memory = self.memory
        counts = self.problem.num_strategies[memory.node]
        usages = (memory.usages[at : at + count] for at, count in zip(memory.offset, counts, strict=True))
        spans = zip(memory.node.tolist(), memory.first.tolist(), memory.end.tolist(), usages, strict=True)
        edges = zip(self.problem.edges.tolist(), self.problem.edge_costs, strict=True)
        reduction = Reduction(
            self.problem.costs,
            ((i, j, m) for (i, j), m in edges),
            ((node, Part(first, end, usage)) for node, first, end, usage in spans),
            memory.limit,
        )
        reduction.constant += self.constant
        for node, strategies in enumerate(allowed):
            reduction.keep(node, strategies)
        return Core.of(reduction)
