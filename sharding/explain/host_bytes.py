"""Bytes of the host's memory that a program takes per device: offloaded arguments, results and temporaries."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..graph import Graph, Op
from ..memory import Usage
from ..propagation import Assignment
from ..spec import Spec, local_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """Bytes on the host per device."""

    argument_bytes: int = 0
    result_bytes: int = 0
    """Results that do not alias donated arguments."""
    temporary_bytes: int = 0
    """All arrays that the program moves to the host for itself, as if they were live together."""

    @property
    def total_bytes(self) -> int:
        """Arguments, results and temporaries."""
        return self.argument_bytes + self.result_bytes + self.temporary_bytes


def host_bytes(assignment: Assignment, found: Usage) -> HostBytes:
    """The host's memory that a completed program takes, beside what it takes of a device's."""
    graph, specs, sizes = assignment.graph, assignment.specs, assignment.sizes

    def num_bytes(v: int, spec: Spec) -> int:
        return math.prod(local_shape(spec.axes, graph.shapes[v], sizes)) * graph.itemsize(v)

    def at_boundary(v: int) -> int:
        return num_bytes(v, assignment.boundary_spec(v))

    if not graph.memory_kinds and not any(graph.output_memory_kinds):
        return HostBytes()
    kept = {k for k, x in enumerate(found.program.inputs) if x in found.program.kept}
    results = [k for k, kind in enumerate(graph.output_memory_kinds) if kind is not None and k not in found.aliases]
    live = graph.live_values
    return HostBytes(
        argument_bytes=sum(at_boundary(v) for k, v in enumerate(graph.inputs) if v in graph.memory_kinds and k in kept),
        result_bytes=sum(at_boundary(graph.outputs[k]) for k in results),
        temporary_bytes=sum(num_bytes(v, specs[v]) for op in graph.ops for v in _temporaries(op, graph) if v in live),
    )


def _temporaries(op: Op, graph: Graph) -> list[int]:
    """The arrays that an op first writes to the host, unless a loop stacks them or the program returns them."""
    if op.name != "scan ys" and not graph.changes_memory(op):
        return []
    return [v for v in op.results if v in graph.memory_kinds and not _is_passed_on(v, graph)]


def _is_passed_on(v: int, graph: Graph) -> bool:
    """Whether another array of the host takes the place of a value: a stack, or a result of the program."""
    outputs = {*graph.outputs}
    waiting = [v]
    while waiting:
        for use in graph.users[waiting.pop()]:
            if use.name == "scan ys" or any(r in outputs for r in use.results):
                return True
            waiting += use.results if use.name == "edge" else ()
    return False
