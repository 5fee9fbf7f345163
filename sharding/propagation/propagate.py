"""`complete`: infers the `Assignment` of an annotated graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..graph import Annotation, Graph
from ..spec import Dim, MeshSizes, Spec
from . import conflict_detection
from .assignment import Assignment, Given, Policy, Reason
from .axis_atoms import AtomTable
from .conflict_detection import ClaimOrigin
from .fixed_point import Engine
from .storage import Storage


def complete(graph: Graph, sizes: Mapping[str, int], *, policy: Policy = "shardy") -> Assignment:
    """Returns a spec for every value of `graph` over mesh axes of the given sizes, with the reason for every axis.

    Annotations are kept as they are; everything else is inferred from them.

    Args:
        graph: the annotated program.
        sizes: of the mesh axes.
        policy: see `Policy`.
    """
    prioritized = Storage(graph, sizes).deferred if policy == "storage" else lambda annotated: annotated
    return _completed(Engine(prioritized(graph), AtomTable.of(sizes)), graph, policy, prioritized)


def _completed(
    engine: Engine,
    as_annotated: Graph,
    policy: Policy,
    prioritized: Callable[[Graph], Graph],
    searches: dict[str, Any] | None = None,
) -> Assignment:
    engine.run()
    graph, specs = engine.graph, specs_of(engine)
    of_others: dict[str, Any] = {} if searches is None else searches

    def with_annotations(annotations: Mapping[int, Annotation]) -> Assignment:
        changed = as_annotated.with_annotations(annotations)
        return _completed(engine.restarted(prioritized(changed)), changed, policy, prioritized, of_others)

    return Assignment(
        graph=graph,
        sizes=engine.table.mesh_sizes,
        specs=specs,
        with_annotations=with_annotations,
        find_reason=lambda v, d, axis: _reason(engine, v, d, engine.table.atoms_of((axis,))[0]),
        find_conflicts=lambda: conflict_detection.find(engine, specs, functools.partial(_claim_origin, engine, {})),
        given=Given(as_annotated.annotations, policy),
        searches={} if searches is None else searches,
    )


def unannotated(graph: Graph, sizes: Mapping[str, int]) -> Assignment:
    """Returns the annotations alone, without propagation, to leave the rest to XLA."""
    specs = tuple(
        graph.annotations[v].spec if v in graph.annotations else Spec(dims=(Dim(open=True),) * len(shape))
        for v, shape in enumerate(graph.shapes)
    )
    return Assignment(
        graph=graph,
        sizes=MeshSizes(sizes),
        specs=specs,
        with_annotations=lambda annotations: unannotated(graph.with_annotations(annotations), sizes),
        find_reason=lambda v, d, _: Reason(word="annotated", origin=graph.annotations[v].origin_of(d)),
    )


def specs_of(engine: Engine) -> tuple[Spec, ...]:
    """Returns the spec of every value in an engine's state."""

    def spec(number: int) -> Spec:
        dims = tuple(Dim(axes=engine.table.axes_of(atoms)) for atoms in engine.shardings[number].axes)
        return Spec(dims=dims, unreduced=())

    known, state = engine.specs, engine.state
    known.update((number, spec(number)) for number in {*state} - known.keys())
    return (
        tuple(known[state[v]] for v in engine.graph.representatives)
        if engine.graph.groups
        else tuple(map(known.__getitem__, state))
    )


def _reason(engine: Engine, v: int, d: int, atom: int) -> Reason:
    graph = engine.graph
    step = engine.step(v, d, atom)
    first = step.value if step is not None else _annotated(engine, v, d, atom)
    if first != v:
        return Reason(word="same group", site=graph.group_site(v, first), value=first, dim=d)
    if step is None:
        return Reason(word="annotated", origin=graph.annotations[v].origin_of(d))
    return Reason.of(engine.op_graph.ops[step.op], step.source, step.source_dim)


def _annotated(engine: Engine, v: int, d: int, atom: int) -> int:
    """Returns the member of a value's group (usually the value itself) whose annotation has an atom in a dim."""
    annotations = engine.graph.annotations
    members = (m for m in engine.graph.members(v) if m in annotations)
    return next((m for m in members if atom in engine.table.atoms_of(annotations[m].spec.dims[d].axes)), v)


def _claim_origin(
    engine: Engine, known: dict[tuple[int, int, int], ClaimOrigin], v: int, d: int, atom: int
) -> ClaimOrigin:
    """Returns the annotation that an atom on a dim came from; those of all values on the way become known."""
    passed = dict[tuple[int, int, int], None]()
    at = (v, d, atom)
    while at not in known and at not in passed:
        passed[at] = None
        step = engine.step(*at)
        if step is None:
            known[at] = _annotated_claim(engine, *at)
        else:
            at = (step.source, step.source_dim, atom)
    known.update(dict.fromkeys(passed, known[at] if at in known else _annotated_claim(engine, *at)))
    return known[v, d, atom]


def _annotated_claim(engine: Engine, v: int, d: int, atom: int) -> ClaimOrigin:
    annotation = engine.graph.annotations.get(_annotated(engine, v, d, atom))
    if annotation is None:
        return ClaimOrigin("unknown", is_stored=False)
    return ClaimOrigin(annotation.origin_of(d), annotation.spec.dims[d].is_stored)
