"""Conflicts: the factors on which the arrays of an op disagree once the pass has settled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..graph import Graph, Op
from ..rules import Kind
from ..spec import Spec
from .assignment import Claim, Conflict
from .atoms import Atoms
from .engine import Engine

Origin = Callable[[int, int, int], str]
"""(value, dim, atom) -> the annotation it came from."""


def find(engine: Engine, specs: tuple[Spec, ...], origin: Origin) -> tuple[Conflict, ...]:
    """Every conflict once, in program order, then annotations of one value that contradict each other."""
    seen: dict[tuple[int, int, tuple[int, ...]], Conflict] = {}
    for i in range(len(engine.ops)):
        for key, conflict in _at(engine, i, specs, origin):
            seen.setdefault(key, conflict)
    return (*seen.values(), *_clashes(engine.graph))


def _at(engine: Engine, i: int, specs: tuple[Spec, ...], origin: Origin) -> Iterator[tuple]:
    """((value, dim, axes it misses), conflict) for every array of an op that lacks what another one has."""
    op, tensors = engine.ops[i], engine.tensors[i]
    if op.rule is None or not engine.touched(i):
        return
    parts = [engine.project(t, op.rule.sizes)[0] for t in tensors]
    for f, kind in enumerate(op.rule.kinds):
        holders = [t for t in range(len(tensors)) if f in parts[t]]
        if kind is Kind.REPLICATE or f in op.rule.blocked or not holders:
            continue
        longest = max(holders, key=lambda t: (len(parts[t][f]), -t))
        winner = (tensors[longest].value, _dim(tensors[longest].dims, f))
        if not engine.axes[winner[0]][winner[1]]:
            continue
        for t in holders:
            if parts[t][f] != parts[longest][f]:
                at = (tensors[t].value, _dim(tensors[t].dims, f))
                side = _Side(engine, specs, origin, *at, have=parts[t][f], want=parts[longest][f])
                yield (*at, side.want), side.conflict(op, *winner)


@dataclass(frozen=True, slots=True)
class _Side:
    """An array's dim that has some atoms of a factor and misses others."""

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
        """The conflict with the value's dim that has all the atoms."""
        join = self.engine.table.join
        lost = Claim(
            name=self.engine.graph.label(value),
            value=value,
            dim=dim,
            axes=join(self.want),
            origin=self.origin(value, dim, self.missing),
        )
        return Conflict(
            op=op.name, source=op.source, kept=self.kept(), lost=lost, rule=self.rule(), bytes_lost=self.bytes_lost()
        )

    def kept(self) -> Claim:
        """What stands in the way: the dim that the missing axis splits already, or this dim as it is."""
        axes = self.engine.axes[self.value]
        dim = next((k for k, dim in enumerate(axes) if self.missing in dim), self.dim)
        came = self.origin(self.value, dim, axes[dim][0]) if axes[dim] else _pinned(self.engine.graph, self.value)
        name = self.engine.graph.label(self.value)
        return Claim(name=name, value=self.value, dim=dim, axes=self.engine.table.join(axes[dim]), origin=came)

    def rule(self) -> str:
        """Why the claim that stands won."""
        engine, v, d = self.engine, self.value, self.dim
        if any(self.missing in dim for k, dim in enumerate(engine.axes[v]) if k != d):
            return "the axis already splits another dim"
        if self.have and self.have[: len(self.want)] != self.want[: len(self.have)]:
            return "the dim is split by other axes, which came first"
        if self.missing in engine.held[v]:
            return "the axis is held for a lower priority"
        return "the annotation closes the dim" if engine.closed[v][d] else "the op priority keeps it from flowing here"

    def bytes_lost(self) -> int:
        """What each device holds more than if the claim were met."""
        sizes = self.engine.table.sizes
        now = _bytes(self.engine.graph, self.value) // self.specs[self.value].num_shards(self.engine.table.mesh_sizes)
        gain = math.prod(sizes[a] for a in self.want) // math.prod(sizes[a] for a in self.have)
        return now - now // max(1, gain)


def _clashes(graph: Graph) -> Iterator[Conflict]:
    for v, kept, other in graph.clashes:
        for d, (a, b) in enumerate(zip(kept.spec.dims, other.spec.dims, strict=True)):
            if a != b:
                yield Conflict(
                    op="annotation",
                    source=graph.source(v),
                    kept=Claim(name=graph.label(v), value=v, dim=d, axes=a.axes, origin=kept.origin),
                    lost=Claim(name=graph.label(v), value=v, dim=d, axes=b.axes, origin=other.origin),
                    rule="the first annotation of a value stays",
                    bytes_lost=_bytes(graph, v),
                )


def _pinned(graph: Graph, v: int) -> str:
    return graph.pins[v].origin if v in graph.pins else "no annotation"


def _bytes(graph: Graph, v: int) -> int:
    dtype = graph.dtypes[v]
    return math.prod(graph.shapes[v]) * int(getattr(dtype, "itemsize", 0) or 0)


def _dim(dims: tuple[tuple[int, ...], ...], factor: int) -> int:
    return next(d for d, dim in enumerate(dims) if factor in dim)
