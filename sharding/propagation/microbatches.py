"""Microbatches: where the batch is split and taken apart, its axes shard each part.

A step with gradient accumulation splits the batch, ``x.reshape(n, -1, ...)``, and iterates over the parts. In GSPMD and
Shardy the axes of the batch stay on the split dim's major part, the number of the microbatch; a loop takes that apart,
and every device computes every microbatch. Here they shard the examples of a microbatch, as if the result of the split
were annotated so.

Such are reshapes that split a dim of which the major part is only sliced or iterated over, and slices at an index that
is not known before the run: of an annotated dim, or one that ops passed on from it as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..graph import Annotation, Graph, Op
from ..rules import Kind, Rule
from ..spec import Axis, Dim, Spec, num_parts
from .dim_classes import ArrayDim

_SLICES = frozenset({"slice", "dynamic_slice", "scan xs"})


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A dim that holds the examples of one microbatch."""

    at: ArrayDim
    whole: ArrayDim
    """The annotated dim that it is a part of."""

    def annotation(self, graph: Graph, sizes: Mapping[str, int]) -> Annotation | None:
        """The annotation of the whole as that of this dim, over as many of its axes as divide it; None if over none."""
        (value, dim), (v, d) = self.at, self.whole
        given, shape = graph.annotations[v], graph.shapes[value]
        axes: tuple[Axis, ...] = given.spec.dims[d].axes
        while axes and shape[dim] % num_parts(axes, sizes):
            axes = axes[:-1]
        if not axes:
            return None
        dims = [Dim(open=True)] * len(shape)
        dims[dim] = dataclasses.replace(given.spec.dims[d], axes=axes)
        return Annotation(spec=Spec(dims=tuple(dims)), origin=f"{given.origin}, of each microbatch")


def parts(graph: Graph) -> Iterator[tuple[ArrayDim, ArrayDim]]:
    """Yields the dims that hold parts of other dims, each with that dim; of any program, whatever is annotated."""
    for op in graph.ops:
        if op.name not in ("dynamic_slice", "reshape") or op.rule is None or op.is_unknown:
            continue
        for d in range(len(graph.shapes[op.operands[0]])):
            part = _part(graph, op, op.rule, (op.operands[0], d))
            if part is not None:
                yield part, (op.operands[0], d)


def microbatches(found: Iterable[tuple[ArrayDim, ArrayDim]], graph: Graph) -> Iterator[Microbatch]:
    """Yields those of the `parts` of a program that are of annotated dims, in values without an annotation."""
    for part, of in found:
        whole = _annotated(graph, of) if part[0] not in graph.annotations else None
        if whole is not None:
            yield Microbatch(part, whole)


def _annotated(graph: Graph, start: ArrayDim) -> ArrayDim | None:
    """The dim with annotated axes that a dim is, as it is, if any."""
    waiting, seen = [start], {start}
    while waiting:
        v, d = waiting.pop()
        if v in graph.annotations:
            if graph.annotations[v].spec.dims[d].axes:
                return v, d
            continue
        op = graph.makers.get(v)
        if op is None or op.rule is None or op.is_unknown:
            continue
        for u in dict.fromkeys(op.operands):
            found = [(u, e) for e in range(len(graph.shapes[u])) if (v, d) in _kept(op, op.rule, (u, e))]
            waiting += [at for at in found if at not in seen]
            seen.update(found)
    return None


def _part(graph: Graph, op: Op, rule: Rule, at: ArrayDim) -> ArrayDim | None:
    """The dim of an op's result that holds the examples of one microbatch, if the op takes apart or splits a dim."""
    factors, (result,) = _operand_factors(op, rule, at), op.results
    places = {own[0]: d for d, own in enumerate(rule.results[0]) if len(own) == 1}
    if op.name == "dynamic_slice":
        d = places.get(factors[0]) if rule.kinds[factors[0]] is Kind.REPLICATE else None
        return (result, d) if d is not None and graph.shapes[result][d] > 1 else None
    if len(factors) < 2 or not {*factors[:2]} <= {*places}:
        return None
    number, examples = (places[f] for f in factors[:2])
    return (result, examples) if _is_taken_apart(graph, (result, number)) else None


def _is_taken_apart(graph: Graph, start: ArrayDim) -> bool:
    """Whether all that reads a dim takes one index or slice of it at a time."""
    waiting, seen, is_read = [start], {start}, False
    while waiting:
        at = waiting.pop()
        if at[0] in graph.outputs:
            return False
        for op in graph.users[at[0]]:
            if op.rule is None or op.is_unknown:
                return False
            if op.name in _SLICES and _takes_part(graph, op, op.rule, at):
                is_read = True
                continue
            results = list(_kept(op, op.rule, at))
            if not results:
                return False
            waiting += [one for one in results if one not in seen]
            seen.update(results)
    return is_read


def _takes_part(graph: Graph, op: Op, rule: Rule, at: ArrayDim) -> bool:
    """Whether a slice takes only a part of a dim."""
    kept = [d for d, own in enumerate(rule.results[0]) if own and own[0] in _operand_factors(op, rule, at)]
    return not kept or graph.shapes[op.results[0]][kept[0]] < graph.shapes[at[0]][at[1]]


def _kept(op: Op, rule: Rule, at: ArrayDim) -> Iterator[ArrayDim]:
    """Yields the dims of results that are a dim as it is, where an op passes all through."""
    if any(kind is not Kind.PASS for kind in rule.kinds):
        return
    factors = _operand_factors(op, rule, at)
    for v, dims in zip(op.results, rule.results, strict=True):
        yield from ((v, d) for d, own in enumerate(dims) if own == factors)


def _operand_factors(op: Op, rule: Rule, at: ArrayDim) -> tuple[int, ...]:
    return rule.operands[op.operands.index(at[0])][at[1]]
