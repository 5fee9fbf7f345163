"""All-gathers whose result is only sliced again: the value stays as it is made, and nothing is gathered.

An activation that is annotated `P("data")`, but made and used over `data` and `model`, is the usual case. Compilers for
TPUs and GPUs remove such an all-gather and slice, that for CPUs does not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from ..cost import SUMS
from ..graph import Op
from ..propagation import Assignment
from ..spec import Spec, divisible
from .op_strategy import OpStrategies
from .reshard import DimAxes

ROTATED_BY = frozenset({"pad", "slice"})
"""Ops that may be part of a rotation, which reads its operand as it is."""


def without_unread_gathers(assignment: Assignment) -> Assignment:
    """The assignment by which the program runs: without all-gathers of which every use slices what it had."""
    assignment = assignment.as_run
    graph, strategies = assignment.graph, OpStrategies(assignment)
    kept = {*graph.outputs, *graph.manual, *graph.divergent}.union(*(group.members for group in graph.groups))
    live = graph.live_values
    specs = list(assignment.specs)
    for op in graph.ops:
        if op.is_unknown or op.name == "edge" or live.isdisjoint(op.results) or not _loses_axes(op, specs):
            continue
        strategy = strategies.of(op)
        for v, have, steps in zip(op.results, strategy.result_specs, strategy.result_steps, strict=True):
            if v in kept or {step.kind for step in steps if step.kind not in SUMS} != {"all-gather"}:
                continue
            uses = [use for use in graph.users[v] if graph.is_live(use, live)]
            if uses and all(_slices(use, v, have.axes, assignment, strategies) for use in uses):
                specs[v] = have
    return assignment if specs == list(assignment.specs) else dataclasses.replace(assignment, specs=tuple(specs))


def _loses_axes(op: Op, specs: Sequence[Spec]) -> bool:
    """Whether an operand is sharded over an axis that a result lacks."""
    had = {axis for v in op.operands for dim in specs[v].axes for axis in dim}
    return bool(had) and not all(had.issubset(itertools.chain.from_iterable(specs[v].axes)) for v in op.results)


def _slices(use: Op, v: int, have: DimAxes, assignment: Assignment, strategies: OpStrategies) -> bool:
    """Whether a use reads no more of a value than each device had before it was gathered."""
    graph = assignment.graph
    if use.rule is None or use.name in ROTATED_BY:
        return False
    wanted: Sequence[Spec]
    if use.name == "edge":
        (target,) = use.results
        spec = assignment.specs[target]
        wanted = [spec if use.site else divisible(spec, graph.shapes[target], assignment.sizes)]
    else:
        pairs = zip(use.operands, strategies.of(use).operand_specs, strict=True)
        wanted = [spec for operand, spec in pairs if operand == v]
    return all(_is_slice(spec.axes, have) for spec in wanted)


def _is_slice(part: DimAxes, whole: DimAxes) -> bool:
    """Whether a device's shard by `part` is its shard by `whole`, or a slice of that."""
    return all(a[: len(b)] == b for a, b in zip(part, whole, strict=True))
