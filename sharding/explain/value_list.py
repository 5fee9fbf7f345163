"""The named values of a completed program with their specs and reasons, as rows and as drawings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..display import ArrayPicture, Drawing
from ..display.units import bytes_text
from ..graph import Graph
from ..hardware import Platform
from ..propagation import Assignment
from .compile_time import compile_time
from .conflict_list import Conflicts
from .unknown_ops import unknown_ops


def word(assignment: Assignment, value: int) -> str:
    """The reason for a value's sharding in a word or two: `annotated`, or the ops its axes came through."""
    spec = assignment.specs[value]
    reasons = (assignment.reason(value, d, a) for d, dim in enumerate(spec.dims) for a in dim.axes)
    return ", ".join(dict.fromkeys(r.word for r in reasons if r is not None)) or "-"


def rows(assignment: Assignment) -> list[tuple[str, str, str, str]]:
    """(name, shape, spec, reason) of every named value; equal layers share a row."""
    graph = assignment.graph
    found = [
        (name, "x".join(map(str, graph.shapes[v])) or "scalar", _spec_text(assignment, v), word(assignment, v))
        for v, name in graph.first_names.items()
    ]
    return [(name, *found[members[0]][1:]) for name, members in graph.layers.merged(found)]


def _spec_text(assignment: Assignment, v: int) -> str:
    kind = assignment.graph.memory_kinds.get(v)
    return f"{assignment.specs[v]} in {kind}" if kind else str(assignment.specs[v])


def notes(assignment: Assignment, conflicts: Conflicts, platform: Platform) -> Iterator[str]:
    """What a reader of the rows should know: conflicts, ops without rules, uneven shardings, slow compilation."""
    graph = assignment.graph
    num_tied = len([v for v in graph.outputs if v in {*graph.inputs}])
    if num_tied:
        yield f"{num_tied} outputs reuse donated inputs' shardings"
    if conflicts:
        lost = sum(c.bytes_lost for c in conflicts)
        yield f"{len(conflicts)} conflicts, {lost} bytes per device more than requested (.conflicts, .suggest())"
    if graph.unknown:
        listed = ", ".join(f"{k} (x{n})" for k, n in sorted(graph.unknown.items()))
        size = sum(one.num_bytes * one.count for one in unknown_ops(assignment))
        gathers = f": {bytes_text(size)} per device are gathered for them (.unknown)" if size else ""
        yield f"no rule for {listed}{gathers}"
    if graph.unused_axis_rules:
        yield f"axis rules that no annotation uses: {', '.join(graph.unused_axis_rules)}"
    yield from (f"uneven: {line}" for line in assignment.uneven[:8])
    found = compile_time(graph, platform)
    if found.rough != "seconds" and found.layers is not None:
        yield str(found)


def first_of_layers(graph: Graph) -> dict[str, int]:
    """Name -> value of all named arrays, of equal layers only the first."""
    found = [(name, graph.shapes[v], graph.dtype_names[v]) for v, name in graph.first_names.items() if graph.shapes[v]]
    firsts = (found[members[0]][0] for _, members in graph.layers.merged(found))
    return {name: graph.names[name] for name in firsts}


def drawing(assignment: Assignment, values: Mapping[str, int]) -> Drawing:
    """Values drawn side by side, as XLA holds them: arguments and results limited to axes that divide them."""
    graph, sizes = assignment.graph, assignment.sizes
    ends = {*graph.inputs, *graph.outputs}
    arrays = []
    for name, v in values.items():
        spec = assignment.boundary_spec(v) if v in ends else assignment.specs[v]
        arrays.append(ArrayPicture(name=name, dtype=graph.dtype_names[v], shape=graph.shapes[v], spec=spec))
    return Drawing(arrays=tuple(arrays), sizes=sizes)
