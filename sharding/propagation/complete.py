"""`complete(graph, sizes)`: annotations in, an `Assignment` out."""

from __future__ import annotations

from collections.abc import Mapping

from ..graph import Graph
from ..spec import Dim, Spec
from . import conflicts
from .assignment import Assignment, Reason, Reasons
from .atoms import Atoms, AtomTable
from .engine import Engine


def complete(graph: Graph, sizes: Mapping[str, int]) -> Assignment:
    """A spec for every value of `graph` over mesh axes of the given sizes, with the reason of every axis.

    The graph's pins are kept as they are; everything else is inferred from them.
    """
    table = AtomTable.of(sizes)
    engine = Engine(graph, table)
    engine.run()
    specs = _specs(engine)
    return Assignment(
        graph=graph,
        sizes=dict(sizes),
        specs=specs,
        find_reasons=lambda: _reasons(engine, specs),
        find_conflicts=lambda: conflicts.find(engine, specs, lambda v, d, atom: _origin(engine, v, d, atom)),
    )


def unannotated(graph: Graph, sizes: Mapping[str, int]) -> Assignment:
    """The assignment that completes nothing: the annotations alone, for leaving the rest to XLA."""
    specs = tuple(
        graph.pins[v].spec if v in graph.pins else Spec(dims=(Dim(open=True),) * len(shape))
        for v, shape in enumerate(graph.shapes)
    )
    return Assignment(graph=graph, sizes=dict(sizes), specs=specs, find_reasons=lambda: _annotations(graph))


def _annotations(graph: Graph) -> Reasons:
    return {
        (v, d, axis): Reason(word="annotated", origin=pin.said(d))
        for v, pin in graph.pins.items()
        for d, dim in enumerate(pin.spec.dims)
        for axis in dim.axes
    }


def _specs(engine: Engine) -> tuple[Spec, ...]:
    known: dict[tuple[Atoms, ...], Spec] = {}

    def spec(axes: tuple[Atoms, ...]) -> Spec:
        if axes not in known:
            known[axes] = Spec(dims=tuple(Dim(axes=engine.table.join(a)) for a in axes), unreduced=())
        return known[axes]

    return tuple(spec(tuple(axes)) for axes in engine.axes)


def _reasons(engine: Engine, specs: tuple[Spec, ...]) -> Reasons:
    return {
        (v, d, axis): _reason(engine, v, d, engine.table.split((axis,))[0])
        for v, spec in enumerate(specs)
        if engine.split[v]
        for d, dim in enumerate(spec.dims)
        for axis in dim.axes
    }


def _reason(engine: Engine, v: int, d: int, atom: int) -> Reason:
    step = engine.why.get((v, d, atom))
    if step is None:
        return Reason(word="annotated", origin=engine.graph.pins[v].said(d))
    op = engine.ops[step.op]
    return Reason(word=op.name, site=op.site, value=step.source, dim=step.source_dim)


def _origin(engine: Engine, v: int, d: int, atom: int) -> str:
    seen = set()
    while (v, d) not in seen:
        seen.add((v, d))
        step = engine.why.get((v, d, atom))
        if step is None:
            break
        v, d = step.source, step.source_dim
    return engine.graph.pins[v].said(d) if v in engine.graph.pins else "unknown"
