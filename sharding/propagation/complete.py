"""`complete(graph, sizes)`: annotations in, an `Assignment` out."""

from __future__ import annotations

from collections.abc import Mapping

from ..graph import Graph
from ..spec import Dim, Spec
from . import conflicts
from .assignment import Assignment, Reason
from .atoms import AtomTable
from .engine import Engine


def complete(graph: Graph, sizes: Mapping[str, int]) -> Assignment:
    """A spec for every value of `graph` over mesh axes of the given sizes, with the reason of every axis.

    The graph's pins are kept as they are; everything else is inferred from them.
    """
    return _completed(Engine(graph, AtomTable.of(sizes)))


def _completed(engine: Engine) -> Assignment:
    engine.run()
    graph, specs = engine.graph, specs_of(engine)
    return Assignment(
        graph=graph,
        sizes=engine.table.mesh_sizes,
        specs=specs,
        with_pins=lambda pins: _completed(engine.again(graph.with_pins(pins))),
        find_reason=lambda v, d, axis: _reason(engine, v, d, engine.table.split((axis,))[0]),
        find_conflicts=lambda: conflicts.find(engine, specs, lambda v, d, atom: _origin(engine, v, d, atom)),
    )


def unannotated(graph: Graph, sizes: Mapping[str, int]) -> Assignment:
    """The assignment that completes nothing: the annotations alone, for leaving the rest to XLA."""
    specs = tuple(
        graph.pins[v].spec if v in graph.pins else Spec(dims=(Dim(open=True),) * len(shape))
        for v, shape in enumerate(graph.shapes)
    )
    return Assignment(
        graph=graph,
        sizes=dict(sizes),
        specs=specs,
        with_pins=lambda pins: unannotated(graph.with_pins(pins), sizes),
        find_reason=lambda v, d, _: Reason(word="annotated", origin=graph.pins[v].said(d)),
    )


def specs_of(engine: Engine) -> tuple[Spec, ...]:
    """The spec of every value as an engine has it."""

    def spec(number: int) -> Spec:
        dims = tuple(Dim(axes=engine.table.join(atoms)) for atoms in engine.splits[number].axes)
        return Spec(dims=dims, unreduced=())

    known = {number: spec(number) for number in dict.fromkeys(engine.state)}
    state = engine.state
    return (
        tuple(known[state[home]] for home in engine.graph.homes)
        if engine.graph.groups
        else tuple(map(known.__getitem__, state))
    )


def _reason(engine: Engine, v: int, d: int, atom: int) -> Reason:
    graph = engine.graph
    step = engine.step(v, d, atom)
    first = step.value if step is not None else _annotated(engine, v, d, atom)
    if first != v:
        return Reason(word="same group", site=graph.tied_at(v, first), value=first, dim=d)
    if step is None:
        return Reason(word="annotated", origin=graph.pins[v].said(d))
    return Reason.of(engine.network.ops[step.op], step.source, step.source_dim)


def _annotated(engine: Engine, v: int, d: int, atom: int) -> int:
    """The member of a value's group, itself as a rule, whose annotation says that a dim has an atom."""
    pins = engine.graph.pins
    members = (m for m in engine.graph.members(v) if m in pins)
    return next((m for m in members if atom in engine.table.split(pins[m].spec.dims[d].axes)), v)


def _origin(engine: Engine, v: int, d: int, atom: int) -> str:
    seen = set()
    while (v, d) not in seen:
        seen.add((v, d))
        step = engine.step(v, d, atom)
        if step is None:
            v = _annotated(engine, v, d, atom)
            break
        v, d = step.source, step.source_dim
    return engine.graph.pins[v].said(d) if v in engine.graph.pins else "unknown"
