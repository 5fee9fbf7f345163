"""Storage specs: where a parameter's spec and the batch claim one axis, the batch takes it first.

FSDP and ZeRO-3 shard parameters and optimizer state over axes that shard the batch, too. There the spec of a parameter
says where it is *stored*: the batch keeps the axis, and the parameter is gathered for its use. Shardy's order, in
which the larger operand wins, shards the features of activations instead, from the embedding on.

Which dims are the batch's is a property of the program, not of names: those of a class of dims (`dim_classes.py`) with
an argument that flows freely (`data_flow.py`) through most of the program's contractions. State that the program
updates, such as optimizer state, is no evidence: it is read element by element. Dims that products compute apart, such
as the experts of a mixture, are no storage: tokens are sent to them. Where the activations are smaller than the
parameters that they meet, as in decoding, gathering parameters is not worth it, and Shardy's order is kept.

References:
    FSDP: Zhao et al., arXiv:2304.11277, section 3. ZeRO-3: Rajbhandari et al., arXiv:1910.02054, section 5.3.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from ..graph import Annotation, Graph
from ..spec import Dim
from .data_flow import DataFlow
from .dim_classes import ArrayDim, DimClasses
from .microbatches import Microbatch, microbatches, parts

Groups = Mapping[int, list[ArrayDim]]
"""Class -> dims in it."""


class Storage:
    """Tells the storage specs of a program; what it finds of the program serves all annotations of it."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int]):
        self.flow, self.sizes = DataFlow(graph), sizes

    @cached_property
    def classes(self) -> DimClasses:
        """The classes of dims."""
        return DimClasses(self.flow.graph)

    @cached_property
    def parts(self) -> list[tuple[ArrayDim, ArrayDim]]:
        """The dims that hold parts of others."""
        return list(parts(self.flow.graph))

    def deferred(self, graph: Graph) -> Graph:
        """Returns the program with the storage specs of its arguments and results at a lower priority than the batch's.

        Only dims of priority 0 that claim an axis of the batch are deferred, to priority 1, and marked as stored. So
        are annotations of values that are like a stored argument in every dim, such as its gradient. Microbatches are
        annotated as the batch that they are parts of.

        Args:
            graph: the program, with any annotations.
        """
        graph, split = self._with_microbatches(graph)
        stored = self._stored_dims(graph, split)
        changed: dict[int, Annotation] = {}
        for v in {v for v, _ in stored}:
            annotation = graph.annotations[v]
            dims = tuple(
                dataclasses.replace(dim, priority=1, is_stored=True) if (v, d) in stored and dim.priority == 0 else dim
                for d, dim in enumerate(annotation.spec.dims)
            )
            changed[v] = dataclasses.replace(annotation, spec=dataclasses.replace(annotation.spec, dims=dims))
        return graph.with_annotations(changed) if changed else graph

    def _with_microbatches(self, graph: Graph) -> tuple[Graph, Sequence[Microbatch]]:
        """The program with its microbatches annotated, and these."""
        found = list({one.at[0]: one for one in microbatches(self.parts, graph)}.values())
        if not found:
            return graph, ()
        classes = self.classes
        batch = _batch_classes(self.flow, classes, {classes.of(one.at) for one in found}, [one.at for one in found])
        annotations = {one: one.annotation(graph, self.sizes) for one in found if classes.of(one.at) in batch}
        given = {one: annotation for one, annotation in annotations.items() if annotation is not None}
        return graph.with_annotations({one.at[0]: annotation for one, annotation in given.items()}), [*given]

    def _stored_dims(self, graph: Graph, split: Sequence[Microbatch]) -> set[ArrayDim]:
        """Returns the dims of arguments and results, and of gradients of these, that claim an axis of the batch."""
        claims = _claims(graph, split)
        if all(len(dims) < 2 for dims in claims.values()):
            return set()
        classes, flow = self.classes, self.flow
        by_axis = {axis: _grouped(classes, dims) for axis, dims in claims.items()}
        contested = {axis: groups for axis, groups in by_axis.items() if len(groups) > 1}
        claimed = {c for groups in contested.values() for c in groups}
        batch = _batch_classes(flow, classes, claimed, [one.at for one in split])
        contested = {axis: groups for axis, groups in contested.items() if not batch.isdisjoint(groups)}
        others = {c: dims for groups in contested.values() for c, dims in groups.items() if c not in batch}
        kept = batch | {c for c, dims in others.items() if any(map(flow.is_batched, dims))}
        stored = {at for groups in contested.values() for c, dims in groups.items() if c not in kept for at in dims}
        forms, ends = {classes.form(v) for v, _ in stored}, {*_ends(graph), *(one.at[0] for one in split)}
        gradients = [v for v in graph.annotations if v not in ends and classes.form(v) in forms]
        return stored | {
            (v, d)
            for v in gradients
            for d, dim in enumerate(graph.annotations[v].spec.dims)
            for c in [classes.of((v, d))]
            if c not in kept and any(c in contested.get(axis, {}) for axis in _names(dim))
        }


def _ends(graph: Graph) -> dict[int, None]:
    return dict.fromkeys((*graph.inputs, *graph.outputs))


def _names(dim: Dim) -> list[str]:
    return [axis if isinstance(axis, str) else axis[0] for axis in dim.axes]


def _claims(graph: Graph, split: Sequence[Microbatch]) -> Mapping[str, list[ArrayDim]]:
    """Mesh axis -> the dims of arguments, results and microbatches that annotations shard over it.

    Of a batch that is split into microbatches, these have the claims.
    """
    found: defaultdict[str, list[ArrayDim]] = defaultdict(list)
    wholes = {one.whole for one in split}
    for v in dict.fromkeys((*_ends(graph), *(one.at[0] for one in split))):
        if v in graph.annotations:
            for d, dim in enumerate(graph.annotations[v].spec.dims):
                for axis in _names(dim) if (v, d) not in wholes else ():
                    found[axis].append((v, d))
    return found


def _grouped(classes: DimClasses, dims: Iterable[ArrayDim]) -> Groups:
    groups: defaultdict[int, list[ArrayDim]] = defaultdict(list)
    for at in dims:
        groups[classes.of(at)].append(at)
    return groups


def _batch_classes(flow: DataFlow, classes: DimClasses, claimed: set[int], examples: Sequence[ArrayDim]) -> set[int]:
    """Returns those of the claimed classes that hold dims of the batch, of an argument or of microbatches."""
    graph = flow.graph
    updated = _updated(graph, classes)
    dims = ((v, d) for v in graph.inputs for d in range(len(graph.shapes[v])))
    arguments = _grouped(classes, itertools.chain(dims, examples))
    evidence = {c: [at for at in arguments.get(c, ()) if at[0] not in updated] for c in claimed}
    found = set()
    for c, dims in evidence.items():
        free = [one for one in map(flow.of, dims) if one.is_free]
        reached = set[int]().union(*(one.contractions for one in free))
        larger = sum(one.own_bytes for one in free) >= sum(one.met_bytes for one in free)
        if free and larger and 2 * len(reached) >= len(flow.contractions):
            found.add(c)
    return found


def _updated(graph: Graph, classes: DimClasses) -> set[int]:
    """Returns the arguments that the program updates.

    Those that are donated for results; without any, those of which a result has the shape, dtype and classes.
    """
    inputs = set(graph.inputs)
    donated = inputs & set(graph.outputs)
    if donated:
        return donated

    def form(v: int) -> tuple:
        return graph.dtypes[v], classes.form(v)

    results = {form(v) for v in graph.outputs}
    updated = {v for v in inputs if form(v) in results}
    return updated if updated != inputs else set()
