"""Other specs tried for each annotation of a plan, costed as the completed program is.

The problem adds up seconds; the estimate knows what overlaps. So the specs that cost least in the problem, if all else
stays as planned, are tried in fact: one that saves replaces the planned one, and the best of the others is the plan's
next best.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec as P

from ..spec import to_partition_spec
from .graph_problem import GraphProblem
from .parallel_plan import NextBest
from .plan_annotations import Annotated, AnnotationSearch, Fits, is_better, score_at
from .problem import FORBIDDEN

ALTERNATIVES = 3
"""Most other specs of an annotation that are tried."""
WITHIN = 0.02
"""Part of the plan's cost that the others may cost beyond the present one in the problem; the first may cost any."""
LEAST_SAVED = 0.002
"""Part of the score that another spec must save to replace the planned one."""


@dataclass(frozen=True, kw_only=True)
class Polish:
    """The last changes to the annotations of one mesh's plan."""

    of: GraphProblem
    choice: np.ndarray
    search: AnnotationSearch
    fits: Fits
    deadline: float
    """Of `time.monotonic`."""

    def run(self, result: Annotated) -> tuple[Annotated, dict[str, NextBest]]:
        """The annotations after those that cost more were replaced, and the next best specs.

        Ends when no annotation has a better spec, at the deadline, or at a Ctrl-C.
        """
        found: dict[str, NextBest] = {}
        names, fruitless = list(self.search.free(result)), 0
        try:
            for name in itertools.cycle(names):
                if fruitless == len(names) or time.monotonic() > self.deadline:
                    break
                fruitless += 1
                tried = self.tried(result, name)
                if not tried:
                    continue
                spec, changed = self.best(tried, result)
                if is_better(changed.costs, result.costs, 1 - LEAST_SAVED) and self.fits(changed.costs):
                    found[name] = NextBest(spec=result.annotations[name], costs=result.all_costs())
                    result, fruitless = changed, 0
                else:
                    found[name] = NextBest(spec=spec, costs=changed.all_costs())
        except KeyboardInterrupt:
            pass
        return result, found

    def best(self, tried: Mapping[P, Annotated], present: Annotated) -> tuple[P, Annotated]:
        """The first that fits by its score at the present peak; if none does, the first of all."""
        ranked = sorted(tried.items(), key=lambda pair: score_at(pair[1].costs, present.costs.peak_bytes))
        return next((pair for pair in ranked if self.fits(pair[1].costs)), ranked[0])

    def tried(self, result: Annotated, name: str) -> dict[P, Annotated]:
        """The programs with the specs that cost least beside the present one."""
        node = self.of.node_of_value(self.search.value(name, result.annotations))
        totals = alternatives(self.of, self.choice, node)
        order = [int(k) for k in np.argsort(totals, kind="stable") if totals[k] < FORBIDDEN]
        specs = [to_partition_spec(self.of.spec(node, k)) for k in order[: ALTERNATIVES + 1]]
        others = [(spec, k) for spec, k in zip(specs, order, strict=False) if spec != result.annotations[name]]
        most = totals[self.choice[node]] + WITHIN * self.of.problem.cost(self.choice)
        tried = [spec for n, (spec, k) in enumerate(others[:ALTERNATIVES]) if n == 0 or totals[k] <= most]
        return {spec: self.search.completed({**result.annotations, name: spec}) for spec in tried}


def alternatives(of: GraphProblem, choice: np.ndarray, node: int) -> np.ndarray:
    """The cost of each strategy of a node, if its neighbours' ops run as is best then, float64 [strategies]."""
    problem, neighbours = of.problem, of.neighbours
    totals = problem.costs[node].copy()
    for other, table, _ in neighbours[node]:
        if of.is_op(other):
            rest = (costs[:, choice[k]] for k, costs, _ in neighbours[other] if k != node)
            totals += (table + sum(rest, problem.costs[other])).min(axis=1)
        else:
            totals += table[:, choice[other]]
    return totals
