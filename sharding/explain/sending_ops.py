"""The ops of a program that may send something: most leave all arrays in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..graph import Graph, Op
from ..rewrite import halo_exchange, xla_workarounds
from .shard_exchanges import ShardExchanges
from .shard_map_collectives import MANUAL

IN_PLACE = xla_workarounds.WORKAROUNDS.keys() | halo_exchange.EXCHANGING | MANUAL.keys() | {"annotate"}
"""Ops that may send although their strategies keep all in place."""


def sending_ops(
    graph: Graph,
    moving: Iterable[Op],
    *,
    arriving: Iterable[int],
    reduced: Collection[int],
    exchanges: ShardExchanges,
) -> set[int]:
    """The ops, by id, that may send something.

    Args:
        graph: the program.
        moving: ops whose strategies move or reduce something, and edges.
        arriving: arguments that arrive sharded otherwise than they are read.
        reduced: results behind which something is reduced.
        exchanges: between neighbours.
    """

    def in_place() -> set[int]:
        turned = exchanges.rotations.keys() | exchanges.rotation_parts
        unlike = (op for op in graph.ops if op.is_unknown or not op.results or not turned.isdisjoint(op.results))
        return {id(op) for op in graph.ops if op.name in IN_PLACE}.union(map(id, unlike))

    found = {id(op) for op in moving} | graph.once("ops that may send in place", in_place)
    found.update(id(op) for v in arriving for op in graph.users[v])
    found.update(id(graph.makers[v]) for v in reduced)
    return found
