"""All values of a program as columns: type, spec, origin, and for every axis one link back to where it came from.

strings     interned texts; the other columns hold their indices
axes        [text, mesh axis, size]; sub-axes have entries of their own
specs       per dim the indices of its axes, major to minor
types       [dtype, bytes per element, shape]
origins     [op, line, scope, "forward" or "backward"] (strings)
type, spec, origin      per value the index of each
arguments, results, named      [name, value]
steps       [reason, line, array] (strings), and the dim that the axis came from, or -1 if from an annotation
step, link  per (value, dim, axis of it), in this order: the step, and how many values back the axis came from
replicated  [value, dim, why it is replicated] (string), without dims that are not reached by any annotation
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ...graph import Graph
from ...graph.places import op_name, scope
from ...propagation import Assignment
from ...spec import Axis, axis_name, axis_size
from ..replication_reasons import UNREACHED, ReplicatedDims
from ..why import origin


class Interned:
    """Values interned by index."""

    def __init__(self):
        self.indices: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        return self.indices.setdefault(value, len(self.indices))

    def all(self) -> list[Any]:
        """The values in the order of their indices."""
        return list(self.indices)


def values(assignment: Assignment, strings: Interned) -> dict[str, Any]:
    """The columns; their texts are interned in `strings`."""
    graph = assignment.graph
    axes, specs, types, origins = Interned(), Interned(), Interned(), Interned()
    inputs = set(graph.inputs)
    makers = {v: op for v, op in graph.makers.items() if v not in inputs}
    columns: dict[str, list[int]] = {"type": [], "spec": [], "origin": []}
    for v, (shape, spec) in enumerate(zip(graph.shapes, assignment.specs, strict=True)):
        columns["type"].append(types((graph.dtype_names[v], graph.itemsize(v), shape)))
        columns["spec"].append(specs(tuple(tuple(axes(a) for a in dim) for dim in spec.axes)))
        maker = makers.get(v)
        name, phase = scope(graph.sites[v])
        texts = ("" if maker is None else op_name(maker), graph.source(v), name, phase)
        columns["origin"].append(origins(tuple(map(strings, texts))))
    return {
        **columns,
        **_reasons(assignment, strings),
        **_names(graph),
        "axes": [_axis(a, assignment) for a in axes.all()],
        "specs": specs.all(),
        "types": types.all(),
        "origins": origins.all(),
        "replicated": _replicated_dims(assignment, strings),
    }


def _axis(axis: Axis, assignment: Assignment) -> tuple[str, str, int]:
    return axis_name(axis), axis if isinstance(axis, str) else axis[0], axis_size(axis, assignment.sizes)


def _names(graph: Graph) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {"arguments": [], "results": [], "named": []}
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    for name, v in graph.names.items():
        is_result = v in outputs and name.partition("/")[0] == "out"
        found["results" if is_result else "arguments" if v in inputs else "named"].append((name, v))
    return found


def _reasons(assignment: Assignment, strings: Interned) -> dict[str, list[Any]]:
    steps, columns = Interned(), {"step": [], "link": []}
    for (value, d, _), reason in assignment.reasons.items():
        source = origin(assignment.graph, value, d, reason) if reason.value is None else reason.source
        words = (reason.word, source, reason.array)
        dim = -1 if reason.value is None or reason.dim is None else reason.dim
        columns["step"].append(steps((*map(strings, words), dim)))
        columns["link"].append(0 if reason.value is None else value - reason.value)
    return {**columns, "steps": steps.all()}


def _replicated_dims(assignment: Assignment, strings: Interned) -> list[tuple[int, int, int]]:
    replicated_dims = ReplicatedDims(assignment)
    found = []
    for v, spec in enumerate(assignment.specs):
        for d, dim in enumerate(spec.dims):
            if not dim.axes and (text := replicated_dims.why(v, d)) != UNREACHED:
                found.append((v, d, strings(text)))
    return found
