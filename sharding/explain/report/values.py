"""All values of a program as columns: what each is, how it is split, and one link back for every axis.

strings     texts that occur more than once, by number
axes        [text, name of the mesh axis, devices along it]; parts of an axis are axes of their own
specs       per dim the numbers of its axes, major to minor
types       [dtype, bytes of an element, shape]
origins     [op, line, scope, "forward" or "backward"] (strings)
type, spec, origin      per value the number of each
arguments, results, named      [name, value]
steps       [word, line, array] (strings), and the dim that the axis came from, or -1 from an annotation
step, link  per (value, dim, axis of it), in this order: the step, and how many values back the axis came from
whole       [value, dim, why it is whole] (string) where more is known than that no annotation reaches it
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

from ... import compat
from ...graph import Graph, Op, Site
from ...propagation import Assignment
from ...spec import Axis, axis_name, axis_size
from ..whole import UNREACHED, Wholes

_TRANSFORMED = re.compile(r"\w+\(|\)")
_OWN_SCOPES = frozenset({"checkpoint", "rematted_computation"})


class Interned:
    """Things by number, each kept once."""

    def __init__(self):
        self.numbers: dict[Hashable, int] = {}

    def __call__(self, thing: Hashable) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))

    def all(self) -> list[Any]:
        """The things in the order of their numbers."""
        return list(self.numbers)


def values(assignment: Assignment, strings: Interned) -> dict[str, Any]:
    """The columns; what they have of texts goes to `strings`."""
    graph = assignment.graph
    axes, specs, types, origins = Interned(), Interned(), Interned(), Interned()
    inputs = set(graph.inputs)
    makers = {v: op for v, op in graph.makers.items() if v not in inputs}
    columns: dict[str, list[int]] = {"type": [], "spec": [], "origin": []}
    for v, (shape, spec) in enumerate(zip(graph.shapes, assignment.specs, strict=True)):
        columns["type"].append(types((str(graph.dtypes[v]), graph.itemsize(v), shape)))
        columns["spec"].append(specs(tuple(tuple(axes(a) for a in dim) for dim in spec.axes)))
        maker = makers.get(v)
        scope, phase = _scope(graph.sites[v])
        words = ("" if maker is None else _made_by(maker), graph.source(v), scope, phase)
        columns["origin"].append(origins(tuple(map(strings, words))))
    return {
        **columns,
        **_reasons(assignment, strings),
        **_names(graph),
        "axes": [_axis(a, assignment) for a in axes.all()],
        "specs": specs.all(),
        "types": types.all(),
        "origins": origins.all(),
        "whole": _wholes(assignment, strings),
    }


def _axis(axis: Axis, assignment: Assignment) -> tuple[str, str, int]:
    return axis_name(axis), axis if isinstance(axis, str) else axis[0], axis_size(axis, assignment.sizes)


def _made_by(op: Op) -> str:
    """The op; of what a loop or branch hands over that loop or branch."""
    if op.name != "edge":
        return op.name
    return op.site[0].primitive.name if op.site else ""


def _scope(site: Site) -> tuple[str, str]:
    """The names that the program gives to the part where a value is made, and which pass it belongs to."""
    stacks = [compat.name_stack(eqn) for eqn in reversed(site)]
    parts = [part for stack in stacks for part in _TRANSFORMED.sub("", stack).split("/")]
    phase = "backward" if any("transpose(" in stack for stack in stacks) else "forward"
    # `einsum` names its parts by their formula, which says less than the line does.
    return "/".join(part for part in parts if part and part not in _OWN_SCOPES and "->" not in part), phase


def _names(graph: Graph) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {"arguments": [], "results": [], "named": []}
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    for name, v in graph.names.items():
        is_result = v in outputs and name.partition("/")[0] == "out"
        found["results" if is_result else "arguments" if v in inputs else "named"].append((name, v))
    return found


def _reasons(assignment: Assignment, strings: Interned) -> dict[str, list[Any]]:
    steps, columns = Interned(), {"step": [], "link": []}
    for (value, _, _), reason in assignment.reasons.items():
        words = (reason.word, reason.source, reason.array)
        dim = -1 if reason.value is None or reason.dim is None else reason.dim
        columns["step"].append(steps((*map(strings, words), dim)))
        columns["link"].append(0 if reason.value is None else value - reason.value)
    return {**columns, "steps": steps.all()}


def _wholes(assignment: Assignment, strings: Interned) -> list[tuple[int, int, int]]:
    wholes = Wholes(assignment)
    found = []
    for v, spec in enumerate(assignment.specs):
        for d, dim in enumerate(spec.dims):
            if not dim.axes and (text := wholes.why(v, d)) != UNREACHED:
                found.append((v, d, strings(text)))
    return found
