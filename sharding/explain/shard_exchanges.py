"""Collective-permutes by which devices exchange parts of their shards: halos, realigned uneven shards, rotations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..graph import Graph, Op
from ..rewrite import halo_exchange
from ..rewrite.halo_exchange import Halo
from ..rewrite.rotation import rotation_parts, rotations
from ..spec import Axis, Spec, axis_name, local_bytes, num_parts
from .collective_ledger import Collective


class ShardExchanges:
    """The exchanges of one program.

    Args:
        graph: the program.
        specs: a spec per value.
        sizes: mesh axis sizes.
        collective: makes a collective of its kind, axes, bytes, op, value, count and cause.
    """

    def __init__(
        self,
        graph: Graph,
        specs: Sequence[Spec],
        sizes: Mapping[str, int],
        collective: Callable[..., Collective],
    ):
        self.graph, self.specs, self.sizes, self.collective = graph, specs, sizes, collective
        makers, self.rotations = graph.makers, rotations(graph)
        parts = (op for result in self.rotations for op in rotation_parts(makers[result], makers))
        self.rotation_parts = {v for op in parts for v in op.results}

    def shard_bytes(self, v: int, spec: Spec) -> int:
        """Bytes of a value on one device."""
        return local_bytes(spec.axes, self.graph.shapes[v], self.graph.itemsize(v), self.sizes)

    def halos(self, op: Op, specs: Sequence[Spec]) -> Iterator[Collective]:
        """Halo exchanges between neighbours along the sharded dims that an op slides a window over."""
        shapes = [self.graph.shapes[v] for v in (*op.operands, *op.results)]
        v = op.operands[0]
        for halo in halo_exchange.halos(op, shapes, specs, self.sizes):
            cause = f"{op.name} exchanges halos along dim {halo.dim}, sharded over {axis_names(halo.axes)}"
            yield from self.permutes(halo, op, v, specs[0], op.times, cause)

    def realigned(self, op: Op, v: int, have: Spec, want: Spec, times: int, what: str) -> Iterator[Collective]:
        """What devices exchange before a dim with uneven shards is sharded over fewer or more axes."""
        for halo in halo_exchange.realignments(have, want, self.graph.shapes[v], self.sizes):
            cause = f"{what}, resharded along dim {halo.dim}, whose shards are uneven"
            yield from self.permutes(halo, op, v, have, times, cause)

    def permutes(self, halo: Halo, op: Op, v: int, have: Spec, times: int, cause: str) -> Iterator[Collective]:
        """The collective-permutes of a halo exchange of a value that is sharded as `have`."""
        shard_bytes = self.shard_bytes(v, have)
        for share in halo.shares:
            yield self.collective("collective-permute", halo.axes, int(shard_bytes * share), op, v, times, cause)

    def rotated(self, op: Op) -> Iterator[Collective]:
        """A rotation (`jnp.roll`) along a sharded dim: the permutes that move rows to other devices."""
        (v,) = op.results
        found, spec = self.rotations[v], self.specs[v]
        axes = spec.dims[found.dim].axes
        if not axes:
            return
        shard_bytes = self.shard_bytes(v, spec)
        for pieces in found.pieces(self.graph.shapes[v][found.dim], num_parts(axes, self.sizes)):
            all_rows = sum(rows for rows, _ in pieces)
            for rows in (rows for rows, away in pieces if away):
                cause = f"rotates dim {found.dim}, sharded over {axis_names(axes)}, by {found.shift}"
                yield self.collective(
                    "collective-permute", axes, shard_bytes * rows // all_rows, op, v, op.times, cause
                )


def axis_names(axes: Sequence[Axis]) -> str:
    """Names of some axes, as text."""
    return ", ".join(map(axis_name, axes))
