"""Conflicts: factors that the arrays of an op shard differently after propagation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..graph import Graph, Op
from ..rules import Kind
from ..spec import Spec
from .axis_atoms import Atoms
from .conflict_report import NO_ANNOTATION, Claim, Conflict
from .factor_propagation import dim_of, project
from .fixed_point import Engine
from .interned_shardings import ValueSharding
from .propagation_graph import OpForm


class ClaimOrigin(NamedTuple):
    """The annotation that an axis on a dim came from."""

    text: str
    is_stored: bool
    """Whether it only says where an array is stored."""


Origin = Callable[[int, int, int], ClaimOrigin]
"""(value, dim, atom) -> the annotation it came from."""


def find(engine: Engine, specs: tuple[Spec, ...], origin: Origin) -> tuple[Conflict, ...]:
    """Returns every conflict once, in program order, then the conflicting annotations of one value.

    An array that is gathered from where it is stored is no conflict.
    """
    seen: dict[tuple[int, int, Atoms], Conflict] = {}
    known: dict[tuple, tuple[_FactorConflict, ...]] = {}  # by form and shardings
    ops = engine.op_graph
    for op, form, arrays in zip(ops.ops, ops.forms, ops.values, strict=True):
        if op.name == "barrier":
            continue
        key = (form.number, *[engine.state[v] for v in arrays])
        found = known.get(key)
        if found is None:
            shardings = [engine.sharding(v) for v in arrays]
            found = known[key] = tuple(_factor_conflicts(form, shardings, engine.table.sizes))
        values = op.operands + op.results
        for one in found:
            value = values[one.array]
            if (value, one.dim, one.want) not in seen:
                kept = _KeptDim(engine, specs, origin, value, one.dim, have=one.have, want=one.want)
                if not origin(values[one.longest], one.longest_dim, kept.missing).is_stored:
                    seen[value, one.dim, one.want] = kept.conflict(op, values[one.longest], one.longest_dim)
    return (*seen.values(), *_annotation_conflicts(engine.graph))


class _FactorConflict(NamedTuple):
    """An array of an op that lacks atoms of a factor, and the array with the longest axes for it."""

    array: int
    dim: int
    have: Atoms
    want: Atoms
    longest: int
    longest_dim: int


def _factor_conflicts(
    form: OpForm, shardings: Sequence[ValueSharding], atom_sizes: Sequence[int]
) -> Iterator[_FactorConflict]:
    if not any(sharding.is_sharded for sharding in shardings):
        return
    projected = [project(form, a, sharding, atom_sizes).factors for a, sharding in enumerate(shardings)]
    for f, kind in enumerate(form.rule.kinds):
        holders = [a for a in range(len(shardings)) if f in projected[a]]
        if kind is Kind.REPLICATE or f in form.rule.blocked or not holders:
            continue
        longest = max(holders, key=lambda a: (len(projected[a][f]), -a))
        dim = dim_of(f, form.arrays[longest])
        if not shardings[longest].axes[dim]:
            continue
        for a in holders:
            have, want = projected[a][f], projected[longest][f]
            if have != want:
                yield _FactorConflict(a, dim_of(f, form.arrays[a]), have, want, longest, dim)


@dataclass(frozen=True, slots=True)
class _KeptDim:
    """A dim that has some atoms of a factor (`have`) but not all of them (`want`)."""

    engine: Engine
    specs: tuple[Spec, ...]
    origin: Origin
    value: int
    dim: int
    have: Atoms
    want: Atoms

    @property
    def missing(self) -> int:
        return next(a for k, a in enumerate(self.want) if k >= len(self.have) or self.have[k] != a)

    def conflict(self, op: Op, value: int, dim: int) -> Conflict:
        """Returns the conflict with the dim of `value` that has all the atoms."""
        lost = Claim(
            name=self.engine.graph.label(value),
            value=value,
            dim=dim,
            axes=self.engine.table.axes_of(self.want),
            origin=self.origin(value, dim, self.missing).text,
        )
        return Conflict(
            op=op.name, source=op.source, kept=self.kept(), lost=lost, rule=self.rule(), bytes_lost=self.bytes_lost()
        )

    def kept(self) -> Claim:
        """Returns the claim that won: the dim already sharded over the missing axis, or this dim as it is."""
        graph, axes = self.engine.graph, self.engine.sharding(self.value).axes
        dim = next((k for k, dim in enumerate(axes) if self.missing in dim), self.dim)
        came = self.origin(self.value, dim, axes[dim][0]).text if axes[dim] else _annotation_origin(graph, self.value)
        name, kept_axes = graph.label(self.value), self.engine.table.axes_of(axes[dim])
        return Claim(name=name, value=self.value, dim=dim, axes=kept_axes, origin=came)

    def rule(self) -> str:
        """Returns why the kept claim won."""
        sharding, d = self.engine.sharding(self.value), self.dim
        if any(self.missing in dim for k, dim in enumerate(sharding.axes) if k != d):
            return "the axis already shards another dim"
        if self.have and self.have[: len(self.want)] != self.want[: len(self.have)]:
            return "the dim is already sharded over other axes"
        if self.missing in sharding.reserved:
            return "the axis is reserved for a lower priority"
        return "the annotation closes the dim" if sharding.closed[d] else "the op priority stops propagation here"

    def bytes_lost(self) -> int:
        """Returns the extra bytes on each device because the other claim was rejected."""
        sizes = self.engine.table.sizes
        now = self.engine.graph.num_bytes(self.value) // self.specs[self.value].num_shards(self.engine.table.mesh_sizes)
        gain = math.prod(sizes[a] for a in self.want) // math.prod(sizes[a] for a in self.have)
        return now - now // max(1, gain)


def _annotation_conflicts(graph: Graph) -> Iterator[Conflict]:
    for v, kept, other in graph.annotation_conflicts:
        for d, (a, b) in enumerate(zip(kept.spec.dims, other.spec.dims, strict=True)):
            if a != b:
                yield Conflict(
                    op="annotation",
                    source=graph.source(v),
                    kept=Claim(name=graph.label(v), value=v, dim=d, axes=a.axes, origin=kept.origin),
                    lost=Claim(name=graph.label(v), value=v, dim=d, axes=b.axes, origin=other.origin),
                    rule="the first annotation of a value wins",
                    bytes_lost=graph.num_bytes(v),
                )


def _annotation_origin(graph: Graph, v: int) -> str:
    return graph.annotations[v].origin if v in graph.annotations else NO_ANNOTATION
