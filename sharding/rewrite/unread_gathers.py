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
from .moving_ops import moving_ops
from .op_strategy import OpStrategies
from .reshard_moves import DimAxes

ROTATED_BY = frozenset({"pad", "slice"})
"""Ops that may be part of a rotation, which reads its operand as it is."""


def without_unread_gathers(assignment: Assignment) -> Assignment:
    """The assignment without all-gathers of which every use slices what it had."""
    graph, strategies = assignment.graph, OpStrategies.shared(assignment)
    kept = {*graph.outputs, *graph.manual, *graph.divergent}.union(*(group.members for group in graph.groups))
    live = graph.live_values
    specs = list(assignment.specs)
    for op in moving_ops(assignment):  # others gather nothing
        if op.is_unknown or op.name == "edge" or live.isdisjoint(op.results) or not _loses_axes(op, specs):
            continue
        strategy = strategies.of(op)
        for v, have, steps in zip(op.results, strategy.result_specs, strategy.result_steps, strict=True):
            kinds = {step.kind for step in steps if step.kind not in SUMS}
            if v in kept or "all-gather" not in kinds or not kinds <= {"all-gather", "slice"}:
                continue
            uses = [use for use in graph.users[v] if graph.is_live(use, live)]
            wanted = [spec for use in uses for spec in _wanted(use, v, assignment, strategies)]
            if not wanted or not all(spec is not None and _is_slice(spec.axes, have.axes) for spec in wanted):
                continue
            if "slice" not in kinds:
                specs[v] = have
            elif len({spec.axes for spec in wanted if spec is not None}) == 1 and wanted[0] is not None:
                specs[v] = wanted[0]
    return assignment if specs == list(assignment.specs) else dataclasses.replace(assignment, specs=tuple(specs))


def _loses_axes(op: Op, specs: Sequence[Spec]) -> bool:
    """Whether an operand is sharded over an axis that a result lacks."""
    had = {axis for v in op.operands for dim in specs[v].axes for axis in dim}
    return bool(had) and not all(had.issubset(itertools.chain.from_iterable(specs[v].axes)) for v in op.results)


def _wanted(use: Op, v: int, assignment: Assignment, strategies: OpStrategies) -> Sequence[Spec | None]:
    """The specs in which a use reads a value; None if that is not known."""
    graph = assignment.graph
    if use.rule is None or use.name in ROTATED_BY:
        return [None]
    if use.name == "edge":
        (target,) = use.results
        spec = assignment.specs[target]
        return [spec if use.site else divisible(spec, graph.shapes[target], assignment.sizes)]
    pairs = zip(use.operands, strategies.of(use).operand_specs, strict=True)
    return [spec for operand, spec in pairs if operand == v]


def _is_slice(part: DimAxes, whole: DimAxes) -> bool:
    """Whether a device's shard by `part` is its shard by `whole`, or a slice of that."""
    return all(a[: len(b)] == b for a, b in zip(part, whole, strict=True))
