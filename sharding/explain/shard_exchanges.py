"""Collective-permutes by which devices exchange parts of their shards: halos, realigned uneven shards, rotations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..graph import Graph, Op
from ..rewrite import halo_exchange
from ..rewrite.halo_exchange import Halo
from ..rewrite.reshard import local_bytes
from ..rewrite.rotation import rotation, rotation_gradient, rotation_parts
from ..spec import Axis, Spec, axis_name, num_parts
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
        uniform = [op for op in graph.ops if not graph.diverges(op)]
        self.rotations = {op.results[0]: shift for op in uniform if (shift := _rotation(op, graph)) is not None}
        makers = graph.makers
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
        """A rotation (`jnp.roll`) along a sharded dim: the permutes that move rows to other devices.

        With uneven shards XLA rotates twice, once past the padding at the end, and selects.
        """
        (v,) = op.results
        (dim, shift), spec = self.rotations[v], self.specs[v]
        axes = spec.dims[dim].axes
        if not axes or not shift:
            return
        shard_bytes, length = self.shard_bytes(v, spec), self.graph.shapes[v][dim]
        rows = -(-length // num_parts(axes, self.sizes))
        parts = -(-length // rows)  # those with any rows
        padding = parts * rows - length
        for amount in (shift, shift + padding) if padding else (shift,):
            far, rest = divmod(amount, rows)
            for part in [n for n, away in ((rows - rest, far), (rest, far + 1)) if n and away % parts]:
                cause = f"rotates dim {dim}, sharded over {axis_names(axes)}, by {shift}"
                yield self.collective("collective-permute", axes, shard_bytes * part // rows, op, v, op.times, cause)


def _rotation(op: Op, graph: Graph) -> tuple[int, int] | None:
    """(dim, shift) if an op rotates an array, or None."""
    shift = rotation(op, graph.makers)
    return rotation_gradient(op, graph.makers) if shift is None else (op.site[0].params["dimension"], shift)


def axis_names(axes: Sequence[Axis]) -> str:
    """Names of some axes, as text."""
    return ", ".join(map(axis_name, axes))
