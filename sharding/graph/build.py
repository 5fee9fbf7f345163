"""`build`: from a closed jaxpr and what is asked of its arguments and results to a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import compat
from . import calls, loops
from .builder import Builder, Handler
from .graph import Graph, Pin
from .groups import pinned

HANDLERS: dict[str, Handler] = {
    "cond": loops.cond,
    "custom_linear_solve": calls.linear_solve,
    "scan": loops.scan,
    "shard_map": calls.shard_map,
    "while": loops.while_,
}


def build(
    closed_jaxpr: Any,
    *,
    sizes: Mapping[str, int],
    in_names: Sequence[str],
    out_names: Sequence[str],
    in_pins: Sequence[Pin | None],
    out_pins: Sequence[Pin | None],
    ties: Mapping[int, int] | None = None,
) -> Graph:
    """The graph of a closed jaxpr.

    Args:
        closed_jaxpr: the traced program.
        sizes: mesh axis sizes.
        in_names: the path of each argument.
        out_names: the path of each result.
        in_pins: what is asked of each argument, if anything.
        out_pins: what is asked of each result, if anything.
        ties: result -> argument pairs that always share one spec (state that comes round again).

    Raises:
        ShardingError: members of a group (`sharding.same`) with annotations that contradict each other.
    """
    b, ties = Builder(sizes, HANDLERS), ties or {}
    g, jaxpr = b.graph, compat.open_jaxpr(closed_jaxpr)
    for var, name, pin in zip(jaxpr.invars, in_names, in_pins, strict=True):
        v = b.value(var.aval, None)
        g.inputs.append(v)
        g.names[name] = v
        if pin is not None:
            g.pins[v] = pin
    g.scope = b.scope(jaxpr, g.inputs, 1)
    for i, (atom, name, pin) in enumerate(zip(jaxpr.outvars, out_names, out_pins, strict=True)):
        source = b.use(b.read(g.scope, atom), atom.aval)
        out = g.inputs[ties[i]] if i in ties else b.value(atom.aval, None)
        g.outputs.append(out)
        g.names[name] = out
        if pin is not None:
            b.pin(out, pin)
        b.edge([source], out, None, 1)
    g.scope.exits = list(g.outputs)
    b.name_repeated()
    pinned(g)  # members of a group that contradict each other are an error here, before anything is completed
    return g
