"""Other specs tried for each annotation of a plan, costed as the completed program is.

The problem adds up seconds; the estimate knows what overlaps. So the specs that cost least in the problem, if all else
stays as planned, are tried in fact: one that saves replaces the planned one, and the best of the others is the plan's
next best. What the problem says costs much more, and the peak of what does not save, waits until somebody asks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jax.sharding import PartitionSpec as P

from ..graph.garbage_collection import no_collection
from ..spec import to_partition_spec
from .graph_problem import GraphProblem
from .parallel_plan import NextBest
from .plan_annotations import Annotated, AnnotationSearch, Fits, is_better, score_at
from .problem import FORBIDDEN

ALTERNATIVES = 3
"""Most other specs of an annotation that are tried."""
WITHIN = 0.02
"""Part of the plan's cost that they may cost beyond the present one in the problem; a next best spec may cost any."""
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

    @no_collection()
    def run(self, result: Annotated) -> tuple[Annotated, NextBests]:
        """The annotations after those that cost more were replaced, and the next best specs.

        Ends when no annotation has a better spec, at the deadline, or at a Ctrl-C.
        """
        found: dict[str, Callable[[], NextBest]] = {}
        names, fruitless = list(self.search.free(result)), 0
        try:
            for name in itertools.cycle(names):
                if fruitless == len(names) or time.monotonic() > self.deadline:
                    break
                fruitless += 1
                specs = self.others(result, name)
                better = self.better(result, name, [spec for spec, is_close in specs.items() if is_close])
                if better is not None:
                    found[name] = partial(_next_best, result.annotations[name], result)
                    result, fruitless = better, 0
                elif specs:
                    found[name] = partial(self.next_best, result, name, list(specs))
        except KeyboardInterrupt:
            pass
        return result, NextBests(found)

    def better(self, result: Annotated, name: str, specs: Sequence[P]) -> Annotated | None:
        """The first program with another spec that saves and fits; None if none does."""
        ranked = (other for _, other in self.ranked(result, name, specs))
        saves = (other for other in ranked if is_better(other.costs, result.costs, 1 - LEAST_SAVED))
        return next((other for other in saves if self.fits(other.costs)), None)

    def next_best(self, result: Annotated, name: str, specs: Sequence[P]) -> NextBest:
        """The first that fits; if none does, the first of all."""
        ranked = self.ranked(result, name, specs)
        return _next_best(*next((pair for pair in ranked if self.fits(pair[1].costs)), ranked[0]))

    def ranked(self, result: Annotated, name: str, specs: Sequence[P]) -> list[tuple[P, Annotated]]:
        """Programs with other specs of an annotation, by their score at the present peak."""
        tried = [(spec, self.search.completed({**result.annotations, name: spec})) for spec in specs]
        return sorted(tried, key=lambda pair: score_at(pair[1].costs, result.costs.peak_bytes))

    def others(self, result: Annotated, name: str) -> dict[P, bool]:
        """The specs that cost least beside the present one, and whether they cost little more; if none does, one."""
        node = self.of.node_of_value(self.search.value(name, result.annotations))
        totals = alternatives(self.of, self.choice, node)
        order = [int(k) for k in np.argsort(totals, kind="stable") if totals[k] < FORBIDDEN]
        most = totals[self.choice[node]] + WITHIN * self.of.problem.cost(self.choice)
        costs = {to_partition_spec(self.of.spec(node, k)): totals[k] for k in order[: ALTERNATIVES + 1]}
        costs.pop(result.annotations[name], None)
        first = next(iter(costs), None)
        found = itertools.islice(costs.items(), ALTERNATIVES)
        return {spec: bool(cost <= most) for spec, cost in found if spec == first or cost <= most}


class NextBests(Mapping[str, NextBest]):
    """The next best spec of each annotation, whose costs are found when they are asked for.

    Args:
        ways: annotation -> what finds it.
    """

    def __init__(self, ways: Mapping[str, Callable[[], NextBest]]):
        self._ways = dict(ways)
        self._found: dict[str, NextBest] = {}

    def __getitem__(self, name: str) -> NextBest:
        if name not in self._found:
            self._found[name] = self._ways[name]()
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ways)

    def __len__(self) -> int:
        return len(self._ways)


def _next_best(spec: P, program: Annotated) -> NextBest:
    return NextBest(spec=spec, costs=program.all_costs())


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
