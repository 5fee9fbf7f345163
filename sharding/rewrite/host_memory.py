"""Arrays in the memory of the host keep their sharding: they are resharded on the device, before or behind the copy.

Propagation gives a saved activation and its copy on the host one sharding, unless the backward pass needs another than
the forward pass has. No chain of reshards may run on the host then: the copy stays sharded as the array it was made of.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ..propagation import Assignment, Reason
from ..spec import Axis
from .op_strategy import OpStrategies

MOST_PASSES = 8
"""Of the ops, whose loops name the arrays that they read behind their bodies."""


def resharded_on_device(assignment: Assignment) -> Assignment:
    """The assignment in which ops between arrays on the host reshard none of them."""
    graph = assignment.graph
    if not graph.memory_kinds:
        return assignment
    strategies, specs, changed = OpStrategies(assignment), list(assignment.specs), {}
    fixed = {*graph.annotations, *graph.inputs}.union(*(group.members for group in graph.groups))
    moves = [
        op
        for op in graph.ops
        if op.rule is not None and len(op.operands) == len(op.results) == 1 and op.results[0] in graph.memory_kinds
    ]
    for _ in range(MOST_PASSES):
        before = list(specs)
        for op in moves:
            (source,), (result,) = op.operands, op.results
            spec = None if result in fixed else strategies.carried(op, 0, specs[source], 1)
            if spec is not None and spec.axes != specs[result].axes:
                specs[result], changed[result] = spec, (op, source)
        if specs == before:
            break
    if not changed:
        return assignment

    def find_reason(value: int, dim: int, axis: Axis) -> Reason | None:
        if value not in changed:
            return assignment.find_reason(value, dim, axis)
        op, source = changed[value]
        dims = [d for d, own in enumerate(specs[source].axes) if axis in own]
        return Reason.of(op, source, dims[0]) if dims else Reason(word=op.name, site=op.site)

    return dataclasses.replace(
        assignment,
        specs=tuple(specs),
        find_reason=find_reason,
        with_annotations=lambda annotations: resharded_on_device(assignment.with_annotations(annotations)),
    )


def memory_alone(target: Any) -> Any:
    """The target of a `device_put` without its spec, which is a constraint of its own."""
    spaces = {"device": jax.memory.Space.Device, "pinned_host": jax.memory.Space.Host}
    is_named = isinstance(target, jax.sharding.NamedSharding)
    return spaces.get(target.memory_kind or "", target) if is_named else target
