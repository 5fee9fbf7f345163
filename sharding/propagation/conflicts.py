"""Conflicts: the factors on which the arrays of an op disagree once the pass has settled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ..graph import Graph
from ..rules import Kind
from ..spec import Spec
from .assignment import Claim, Conflict
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
    op, tensors = engine.ops[i], engine.tensors[i]
    rule = op.rule
    if rule is None or not engine.touched(i):
        return
    parts = [engine.project(t, rule.sizes)[0] for t in tensors]
    for f, kind in enumerate(rule.kinds):
        if kind is Kind.REPLICATE or f in rule.blocked:
            continue
        holders = [t for t in range(len(tensors)) if f in parts[t]]
        if not holders:
            continue
        longest = max(holders, key=lambda t: (len(parts[t][f]), -t))
        want = parts[longest][f]
        for t in holders:
            have = parts[t][f]
            if have == want:
                continue
            v, d = tensors[t].value, _dim(tensors[t].dims, f)
            lv, ld = tensors[longest].value, _dim(tensors[longest].dims, f)
            missing = next(a for k, a in enumerate(want) if k >= len(have) or have[k] != a)
            rule_text = _rule(engine, v, d, have, want, missing)
            if not engine.axes[lv][ld]:
                continue
            lost = Claim(value=lv, dim=ld, axes=engine.table.join(want), origin=origin(lv, ld, missing))
            kept_atom = next((a for dim in engine.axes[v] for a in dim if a == missing), None)
            at = next((k for k, dim in enumerate(engine.axes[v]) if kept_atom in dim), d)
            kept_axes = engine.axes[v][at]
            came = origin(v, at, kept_axes[0]) if kept_axes else _pinned(engine.graph, v)
            kept = Claim(value=v, dim=at, axes=engine.table.join(kept_axes), origin=came)
            size = _bytes(engine.graph, v) // max(1, specs[v].num_shards(engine.table.mesh_sizes))
            gain = math.prod(engine.table.sizes[a] for a in want) // math.prod(engine.table.sizes[a] for a in have)
            yield (
                (v, d, want),
                Conflict(
                    op=op.name,
                    source=op.source,
                    kept=kept,
                    lost=lost,
                    rule=rule_text,
                    bytes_lost=size - size // max(1, gain),
                ),
            )


def _rule(engine: Engine, v: int, d: int, have: tuple, want: tuple, missing: int) -> str:
    if any(missing in dim for k, dim in enumerate(engine.axes[v]) if k != d):
        return "the axis already splits another dim"
    if have and have[: len(want)] != want[: len(have)]:
        return "the dim is split by other axes, which came first"
    if missing in engine.held[v]:
        return "the axis is held for a lower priority"
    return "the annotation closes the dim" if engine.closed[v][d] else "the op priority keeps it from flowing here"


def _clashes(graph: Graph) -> Iterator[Conflict]:
    for v, kept, other in graph.clashes:
        for d, (a, b) in enumerate(zip(kept.spec.dims, other.spec.dims, strict=True)):
            if a != b:
                yield Conflict(
                    op="annotation",
                    source=graph.source(v),
                    kept=Claim(value=v, dim=d, axes=a.axes, origin=kept.origin),
                    lost=Claim(value=v, dim=d, axes=b.axes, origin=other.origin),
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
