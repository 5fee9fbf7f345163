"""`build`: the graph of a closed jaxpr with annotated arguments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import compat
from . import loops, shard_map_bodies
from .annotation import Annotation
from .from_jaxpr import DEVICE, Builder, Handler
from .graph import Graph, Group
from .sharding_groups import group_annotations

HANDLERS: dict[str, Handler] = {
    "cond": loops.cond,
    "custom_linear_solve": shard_map_bodies.linear_solve,
    "scan": loops.scan,
    "shard_map": shard_map_bodies.shard_map,
    "while": loops.while_,
}


def build(
    closed_jaxpr: Any,
    *,
    sizes: Mapping[str, int],
    in_names: Sequence[str],
    out_names: Sequence[str],
    in_annotations: Sequence[Annotation | None],
    out_annotations: Sequence[Annotation | None],
    ties: Mapping[int, int] | None = None,
    shared: Mapping[int, int] | None = None,
    in_memory_kinds: Sequence[str | None] = (),
    out_memory_kinds: Sequence[str | None] = (),
) -> Graph:
    """Builds the graph of a closed jaxpr.

    Args:
        closed_jaxpr: the traced program.
        sizes: mesh axis sizes.
        in_names: the path of each argument.
        out_names: the path of each result.
        in_annotations: the annotation of each argument, or None.
        out_annotations: the annotation of each result, or None.
        ties: result -> argument pairs that must share one spec, such as the state of a training loop.
        shared: argument -> an earlier one that is the same array, such as a tied weight: they share one spec.
        in_memory_kinds: the kind of memory of each argument; None is the device's. Default: by its abstract value.
        out_memory_kinds: that of each result; None is that of the value that is returned.

    Raises:
        ShardingError: conflicting annotations of the members of a group (`sharding.same`).
    """
    b, ties = Builder(sizes, HANDLERS), ties or {}
    g, jaxpr = b.graph, compat.open_jaxpr(closed_jaxpr)
    for var, name, annotation in zip(jaxpr.invars, in_names, in_annotations, strict=True):
        v = b.value(var.aval, None)
        g.inputs.append(v)
        g.names[name] = v
        if annotation is not None:
            g.annotations[v] = annotation
    g.memory_kinds.update((v, kind) for v, kind in zip(g.inputs, in_memory_kinds, strict=False) if kind not in DEVICE)
    g.scope = b.scope(jaxpr, g.inputs, 1)
    for i, (atom, name, annotation) in enumerate(zip(jaxpr.outvars, out_names, out_annotations, strict=True)):
        source = b.use(b.read(g.scope, atom), atom.aval)
        out = g.inputs[ties[i]] if i in ties else b.value(atom.aval, None)
        g.outputs.append(out)
        g.output_memory_kinds.append(g.memory_kinds.get(source))
        g.names[name] = out
        if annotation is not None:
            b.add_annotation(out, annotation)
        b.edge([source], out, None, 1)
        b.depend([out], g.scope.scalars_of([atom]))
    for i, kind in enumerate(out_memory_kinds):
        if kind is not None:
            g.output_memory_kinds[i] = None if kind in DEVICE else kind
    g.scope.exits = list(g.outputs)
    g.groups += [Group((g.inputs[of], g.inputs[i]), ()) for i, of in (shared or {}).items()]
    b.name_repeated()
    group_annotations(g)  # raises on conflicting annotations in a group, before propagation
    return g
