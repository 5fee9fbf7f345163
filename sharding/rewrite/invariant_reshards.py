"""Reshards of loop invariants, before their loops.

What a loop reads in every iteration, such as the weights of a decoder or of a differential equation, and needs in
another sharding than it has outside, is resharded once, before the loop. Compilers move an all-gather out of a loop by
themselves, but XLA:GPU neither an all-to-all nor out of more than one loop, and arrays that several loops gather are
gathered for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .. import compat
from ..graph import Op
from ..propagation import Assignment
from ..spec import Spec
from .op_strategy import OpStrategies
from .reshard import Step

LOOPS = frozenset({"scan", "while"})


def resharded_before_loops(assignment: Assignment) -> Assignment:
    """The assignment in which loop invariants are sharded in their loops as all that reads them there needs them."""
    graph = assignment.graph
    if not any(op.name == "edge" for op in graph.ops):
        return assignment
    strategies = OpStrategies.shared(assignment)
    specs = list(assignment.specs)
    kept = {*graph.annotations, *graph.manual, *graph.divergent}.union(*(group.members for group in graph.groups))
    for op in reversed(graph.ops):  # inner loops first
        if not enters_loop(op) or (v := op.results[0]) in kept or not any(specs[v].axes):
            continue
        needed = [*_needed(op, strategies, specs)]
        if needed and needed[0] is not None and all(x is not None and x.axes == needed[0].axes for x in needed):
            specs[v] = needed[0]
    return assignment if specs == list(assignment.specs) else dataclasses.replace(assignment, specs=tuple(specs))


def enters_loop(op: Op) -> bool:
    """Whether a loop reads an array that it does not change."""
    return op.name == "edge" and len(op.operands) == 1 and bool(op.site) and op.site[0].primitive.name in LOOPS


def _needed(edge: Op, strategies: OpStrategies, specs: list[Spec]) -> Iterator[Spec | None]:
    """The specs in which the ops in a loop need an array that enters it; None where that is not known, or no gain."""
    graph, (v,) = strategies.graph, edge.results
    for use in graph.users[v]:
        inside = use.site[1 : len(use.site) - len(edge.site[1:])]
        if any(map(compat.is_recomputed, inside)):
            yield None
        elif use.name == "edge":
            yield specs[use.results[0]] if enters_loop(use) else None
        elif use.rule is None or use.is_unknown:
            yield None
        else:
            strategy = strategies.of(use)
            for operand, spec, steps in zip(use.operands, strategy.operand_specs, strategy.operand_steps, strict=True):
                if operand == v:
                    yield None if _only_slices(steps) else spec


def _only_slices(steps: tuple[Step, ...]) -> bool:
    return bool(steps) and all(step.kind == "slice" for step in steps)
