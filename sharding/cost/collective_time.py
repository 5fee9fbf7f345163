"""Time of a collective by the alpha-beta model: a message of B bytes takes latency + B / bandwidth.

With V = `num_bytes` as in `wire_bytes`, n devices, and W the bytes per second that a device sends:

- Switch. Ring: (n - 1) steps of V / n for an all-gather or a reduce-scatter, twice as many for an all-reduce (Patarasuk
  and Yuan 2009). Doubling: the same bytes in ceil(log2 n) steps (Bruck et al. 1997; Thakur, Rabenseifner and Gropp
  2005, sections 4 and 5). Double binary trees: an all-reduce of 2 ceil(log2 n) steps and 2 V (Sanders, Speck and Traff
  2009), as in NCCL. All-to-all: (n - 1) messages of V / n, or ceil(log2 n) of V / 2 (Bruck et al.).
  Each collective takes its fastest algorithm, so small messages are latency-bound and large ones bandwidth-bound.
- Torus ring, bidirectional: half of the bytes and hops in each direction: (n - 1) / 2 steps, 2 W. An all-to-all sends
  each chunk along the shorter direction: floor(n^2 / 4) hops of V / n over 2 W (Austin et al., How to Scale Your Model,
  part 3).
- Torus line: the last link carries everything the last device lacks: (n - 1) steps at W. In an all-to-all
  floor(n / 2) ceil(n / 2) chunks cross the middle link.
- Several torus dims: the data in as many parts, each of which goes through the dims in another order, so that all links
  are always busy (ibid.: "bytes / (bandwidth * num_axes)").
- Levels, hierarchically: a reduce-scatter on the inner level, the collective on the outer one, an all-gather on the
  inner level, so that the slower links carry 1 / inner size of the bytes.
- Over all devices of a TPU slice an all-reduce takes the place of a reduce-scatter or, on a large one, an all-gather
  (`xla.collective_lowering`).
- A permute is a shift by one: one message to the next device, over the slowest link on its path.

A chip's measured collectives take precedence over the model, level by level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ..hardware import Chip, MeasuredCollective
from ..spec import Axis
from ..xla.collective_lowering import is_gathered_by_sum, is_slice_wide
from ..xla.collective_ops import Kind, wire_bytes
from .topology import Level, Topology, Way


def collective_seconds(kind: Kind, num_bytes: float, axes: Sequence[Axis] | str, on: Topology) -> float:
    """Seconds of a collective over mesh axes, without contention and once all devices have arrived.

    Args:
        kind: of collective.
        num_bytes: of one device's result; for a reduce-scatter of its operand.
        axes: a mesh axis, several, or sub-axes; groups are the devices that differ only in these.
        on: the mesh on its devices, from `cost.topology`.

    Returns:
        Seconds with all groups running at the same time; 0 for groups of one.
    """
    levels = on.levels((axes,) if isinstance(axes, str) else axes)
    if not levels:
        return 0.0
    chip = on.chip
    kind = _compiled_kind(kind, num_bytes, levels, on)
    if kind == "collective-permute":
        return max(_permute(num_bytes, level, chip) for level in levels)
    phases = _phases(kind, num_bytes, levels)
    return sum(_level_seconds(*phase, chip) for phase in phases)


def collective_wire_bytes(kind: Kind, num_bytes: float, axes: Sequence[Axis], on: Topology) -> int:
    """The bytes that each device sends in a collective, by `wire_bytes` of the kind that the compiler makes of it.

    Args:
        kind: of collective.
        num_bytes: as for `collective_seconds`.
        axes: likewise.
        on: likewise.
    """
    levels = on.levels(axes)
    compiled = _compiled_kind(kind, num_bytes, levels, on) if levels else kind
    return wire_bytes(compiled, round(num_bytes), math.prod(map(_size, levels)))


def _compiled_kind(kind: Kind, num_bytes: float, levels: Sequence[Level], on: Topology) -> Kind:
    """The kind that the compiler makes of a collective over all devices of a TPU slice."""
    size, everyone = math.prod(map(_size, levels)), on.devices.num_devices
    if on.chip.platform != "tpu" or on.islands:
        return kind
    by_sum = kind == "all-gather" and is_gathered_by_sum(size, everyone, on.chip.torus_dims, num_bytes)
    return "all-reduce" if by_sum or (kind == "reduce-scatter" and is_slice_wide(size, everyone)) else kind


def _phases(kind: Kind, num_bytes: float, levels: Sequence[Level]) -> list[tuple[Kind, float, Level]]:
    """The collective at each level: (kind, bytes as in `wire_bytes`, level)."""
    inner, *outer = levels
    if not outer:
        return [(kind, num_bytes, inner)]
    if kind == "all-to-all":
        return [(kind, num_bytes, level) for level in levels]
    outer_phases = _phases(kind, num_bytes / _size(inner), outer)
    before: list[tuple[Kind, float, Level]] = [("reduce-scatter", num_bytes, inner)]
    after: list[tuple[Kind, float, Level]] = [("all-gather", num_bytes, inner)]
    return (before if kind != "all-gather" else []) + outer_phases + (after if kind != "reduce-scatter" else [])


def _size(level: Level) -> int:
    return math.prod(way.size for way in level)


def _level_seconds(kind: Kind, num_bytes: float, level: Level, chip: Chip) -> float:
    measured = _measured(kind, level, chip)
    if measured is not None:
        sent = wire_bytes(kind, round(num_bytes), _size(level))
        return measured.start_seconds + sent / measured.bytes_per_second
    return chip.collective_seconds + _model_seconds(kind, num_bytes, level)


def _measured(kind: Kind, level: Level, chip: Chip) -> MeasuredCollective | None:
    """The measured collective of this kind and link with the nearest group size; None if there is none."""
    size, link = _size(level), level[0].link
    known = [one for one in chip.collectives if one.kind == kind and one.link == link]
    return min(known, key=lambda one: (abs(math.log(one.num_devices / size)), one.num_devices), default=None)


def _permute(num_bytes: float, level: Level, chip: Chip) -> float:
    """One message to the next device; on a line the last device's message goes back over all links."""
    measured = _measured("collective-permute", level, chip)
    if measured is not None:
        return measured.start_seconds + num_bytes / measured.bytes_per_second
    hops = {way: way.size - 1 if way.shape == "line" else 1 for way in level}
    slowest = max(hops[way] * way.latency_seconds + num_bytes / way.bytes_per_second for way in level)
    return chip.collective_seconds + slowest


def _model_seconds(kind: Kind, num_bytes: float, level: Level) -> float:
    if kind == "all-reduce" and level[0].shape != "switch":
        return 2 * _torus_seconds("all-gather", num_bytes, level)
    if level[0].shape != "switch":
        return _torus_seconds(kind, num_bytes, level)
    return min(algorithm(num_bytes, level[0]) for algorithm in _SWITCH[kind])


def _torus_seconds(kind: Kind, num_bytes: float, ways: Level) -> float:
    """Seconds on a torus: the data in one part per dim, each part starting with another dim.

    In each phase every dim moves one part, and the phase ends with the slowest. A part of an all-gather grows with each
    phase; a reduce-scatter is the reverse; parts of an all-to-all keep their size.
    """
    num_parts = len(ways)
    return sum(
        max(_phase_seconds(kind, num_bytes / num_parts, ways, first, phase) for first in range(num_parts))
        for phase in range(num_parts)
    )


def _phase_seconds(kind: Kind, num_bytes: float, ways: Level, first: int, phase: int) -> float:
    """Seconds of one part in one phase, when it started with the dim `first`."""
    order = [ways[(first + i) % len(ways)] for i in range(len(ways))]
    if kind == "all-to-all":
        return _dim_all_to_all(num_bytes, order[phase])
    remaining = math.prod(way.size for way in order[phase + 1 :])
    return _dim_gather(num_bytes / remaining, order[phase])


def _dim_gather(num_bytes: float, way: Way) -> float:
    """An all-gather or reduce-scatter along one dim; `num_bytes` are those of the gathered data."""
    share = num_bytes * (way.size - 1) / way.size
    if way.shape == "ring":
        return way.size // 2 * way.latency_seconds + share / (2 * way.bytes_per_second)
    return (way.size - 1) * way.latency_seconds + share / way.bytes_per_second


def _dim_all_to_all(num_bytes: float, way: Way) -> float:
    part, n = num_bytes / way.size, way.size
    if way.shape == "ring":
        return n // 2 * way.latency_seconds + part * (n * n // 4) / (2 * way.bytes_per_second)
    return (n - 1) * way.latency_seconds + part * (n // 2) * ((n + 1) // 2) / way.bytes_per_second


Algorithm = Callable[[float, Way], float]
"""(bytes as in `wire_bytes`, a switch) -> seconds."""


def _ring(num_bytes: float, way: Way) -> float:
    return (way.size - 1) * (way.latency_seconds + num_bytes / way.size / way.bytes_per_second)


def _doubling(num_bytes: float, way: Way) -> float:
    return _log2_steps(way) * way.latency_seconds + num_bytes * (way.size - 1) / way.size / way.bytes_per_second


def _ring_all_reduce(num_bytes: float, way: Way) -> float:
    return 2 * _ring(num_bytes, way)


def _double_tree(num_bytes: float, way: Way) -> float:
    return 2 * (_log2_steps(way) * way.latency_seconds + num_bytes / way.bytes_per_second)


def _bruck(num_bytes: float, way: Way) -> float:
    return _log2_steps(way) * (way.latency_seconds + num_bytes / 2 / way.bytes_per_second)


def _log2_steps(way: Way) -> int:
    return math.ceil(math.log2(way.size))


_SWITCH: Mapping[Kind, Sequence[Algorithm]] = {
    "all-gather": (_ring, _doubling),
    "reduce-scatter": (_ring, _doubling),
    "all-reduce": (_ring_all_reduce, _double_tree),
    "all-to-all": (_ring, _bruck),  # pairwise exchange takes as many steps of the same size as a ring
}
