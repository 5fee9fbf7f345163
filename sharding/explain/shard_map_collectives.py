"""Explicit collectives, in the bodies of `shard_map`s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .. import compat
from ..annotations.divergent_control_flow import declared_trip_count
from ..cost import Kind
from ..graph import Loop, Scope, Trips, build, line, trip_count
from ..hardware import Platform
from ..memory.primitive_traits import manual_axes
from ..rewrite.bfloat16_propagation import rounded_values
from ..spec import num_parts
from .collective_dtypes import in_bfloat16
from .collective_ledger import Collective

MANUAL: Mapping[str, Kind] = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "collective-permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "ragged_all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}
"""The collective primitives of a `shard_map`."""


def in_bodies(
    scope: Scope,
    sizes: Mapping[str, int],
    platform: Platform,
    trips: Trips,
    times: int = 1,
    loops: tuple[Loop, ...] = (),
) -> Iterator[Collective]:
    """The collectives of `shard_map`s over all mesh axes, whose bodies are not in the graph.

    Args:
        scope: of the program.
        sizes: mesh axis sizes.
        platform: whose compiler runs them.
        trips: of loops of unknown length.
        times: how often the scope runs.
        loops: the enclosing loops of unknown length.
    """
    for i, eqn in enumerate(scope.jaxpr.eqns):
        if eqn.primitive.name == "shard_map" and (i, "jaxpr", 0) not in scope.children:
            for c in _in_body(eqn.params["jaxpr"], sizes, platform, trips, times):
                yield c.in_loops(loops)
    for (i, _, _), child in scope.children.items():
        eqn = scope.jaxpr.eqns[i]
        count = _num_runs(eqn, trips)
        around = loops if count is not None else (*loops, Loop(line((eqn,)), is_condition=False))
        yield from in_bodies(child, sizes, platform, trips, times * (1 if count is None else count), around)


def explicit(
    eqn: Any, result_bytes: int, dtype: str, times: int, source: str, sizes: Mapping[str, int]
) -> Iterator[Collective]:
    """The collective of one equation, if any of its axes has more than one device.

    Args:
        eqn: an equation of one of the primitives in `MANUAL`.
        result_bytes: bytes of the result on one device.
        dtype: of the array.
        times: how often it runs.
        source: the user's line.
        sizes: mesh axis sizes.
    """
    name = eqn.primitive.name
    axes = tuple(axis for axis in manual_axes(eqn) if sizes.get(axis, 1) > 1)
    if axes:
        kind, n = MANUAL[name], num_parts(axes, sizes)
        yield Collective(
            kind=kind, axes=axes, num_devices=n, count=times, dtype=dtype, op=name, source=source, is_manual=True,
            result_bytes=result_bytes * n if kind == "reduce-scatter" else result_bytes,
            cause=f"{name} in a shard_map",
        )  # fmt: skip


def _in_body(
    jaxpr: Any, sizes: Mapping[str, int], platform: Platform, trips: Trips, times: int
) -> Iterator[Collective]:
    body = compat.open_jaxpr(jaxpr)
    ins, outs = ([None] * len(atoms) for atoms in (body.invars, body.outvars))
    names = [[f"{side}{k}" for k in range(len(atoms))] for side, atoms in (("in", ins), ("out", outs))]
    graph = build(jaxpr, sizes=sizes, in_names=names[0], out_names=names[1], in_annotations=ins, out_annotations=outs)
    lines = [loop.source for op in graph.ops for loop in op.loops]
    if not isinstance(trips, int):
        trips = {key: n for key, n in trips.items() if any(source.startswith(key) for source in lines)}
    graph = graph.with_trips(trips)
    live, rounded = graph.live_values, rounded_values(graph) if platform == "tpu" else ()
    for op in graph.ops:
        for v in op.results if op.name in MANUAL else ():
            if v in live:
                found = explicit(
                    op.site[0], graph.num_bytes(v), graph.dtype_names[v], times * op.times, op.source, sizes
                )
                for c in found:
                    is_narrow = v in rounded and c.kind != "reduce-scatter"
                    yield (in_bfloat16(c) if is_narrow else c).in_loops(op.loops)


def _num_runs(eqn: Any, trips: Trips) -> int | None:
    """How often the bodies of an equation run; None if that is unknown."""
    if eqn.primitive.name == "while" and declared_trip_count(compat.name_stack(eqn)) is None:
        return trip_count(line((eqn,)), trips)
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1
