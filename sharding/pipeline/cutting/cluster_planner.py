"""PaddlePaddle's adaptive planning: stages on devices that differ, and again when the cluster changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...errors import ShardingError, raise_together
from .even_stages import ranges
from .layer_costs import check_bandwidths, check_layers, run_sums

ASKED = "cutting.allocate"
MOST_DEVICES = 10
"""All orders of them are considered."""


class ClusterDevice(NamedTuple):
    """A device, or a host whose devices work as one."""

    name: str
    speed: float
    """Work per unit of time."""
    memory_bytes: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The devices there are, and the links between them.

    Example:
        >>> slow, fast = ClusterDevice("a", 1.0), ClusterDevice("b", 2.0)
        >>> Cluster(devices=(slow, fast), bandwidth=1.0, links={("a", "b"): 8.0}).between("b", "a")
        8.0
    """

    devices: tuple[ClusterDevice, ...]
    bandwidth: float
    """Between any two devices, in bytes per unit of time."""
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Pairs of devices, in either order, with another bandwidth."""

    def __post_init__(self) -> None:
        asked, names = "cutting.Cluster", [device.name for device in self.devices]
        if not 0 < len(names) <= MOST_DEVICES or len(set(names)) < len(names):
            found = f"{len(names)} devices with {len(set(names))} names"
            required = f"1 to {MOST_DEVICES} devices, each with a name of its own"
            fix = "a host's devices as one, with the sum of their speeds" if len(names) > MOST_DEVICES else ()
            raise ShardingError(f"{asked}(devices)", found=found, required=required, fix=fix)
        bad = [
            ShardingError(f"{asked}(devices): {device}", required="a positive finite speed, a positive memory_bytes")
            for device in self.devices
            if not (0 < device.speed < math.inf and device.memory_bytes > 0)
        ]
        bad += [
            ShardingError(f"{asked}(links): {pair}", required=f"two devices of {', '.join(names)}")
            for pair in self.links
            if not set(pair) <= set(names)
        ]
        raise_together(asked, bad)
        numbers = [self.bandwidth, *self.links.values()]
        check_bandwidths(asked, **{f"bandwidth {number}": value for number, value in enumerate(numbers)})

    def between(self, first: str, second: str) -> float:
        """The bandwidth between two devices."""
        return self.links.get((first, second), self.links.get((second, first), self.bandwidth))


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Consecutive layers as stages, first to last, each on a device; a device may have none."""

    sizes: tuple[int, ...]
    """Layers of each stage."""
    devices: tuple[str, ...]
    """Of each stage."""
    bottleneck: float
    """Time per microbatch in the steady state: the slowest stage or transfer."""
    moved_bytes: float
    """State of layers that are on another device than before."""

    @property
    def by_layer(self) -> tuple[str, ...]:
        """The device of each layer."""
        return tuple(name for name, run in zip(self.devices, ranges(self.sizes), strict=True) for _ in run)


def allocate(
    work: Sequence[float],
    *,
    activation_bytes: Sequence[float],
    state_bytes: Sequence[float],
    cluster: Cluster,
    before: Allocation | None = None,
    tolerance: float = 0.0,
) -> Allocation:
    """The stages, their devices and the order of these with the least time per microbatch.

    A stage takes its work / the device's speed, a transfer 2 x activation bytes / bandwidth. Of all allocations that
    are at most `tolerance` slower than the best, that with the fewest bytes to move from `before`, so that a change of
    the cluster is followed by no more than it needs: what was on a device that is gone moves in any case. Exact, by
    dynamic programming over sets of devices; takes 2^devices devices^2 layers^2 steps.

    Args:
        work: of each layer for one microbatch, forward and backward.
        activation_bytes: from each layer to the next for one microbatch; the last entry is unused.
        state_bytes: weights, gradients and optimizer state of each layer, which stay within a device's memory.
        cluster: as it is now.
        before: the allocation to change.
        tolerance: 0.05 accepts 5 % more time for fewer bytes.

    Example:
        >>> layers = {"work": [2, 2, 2, 2], "activation_bytes": [1] * 4, "state_bytes": [10] * 4}
        >>> three = [ClusterDevice("a", 1), ClusterDevice("b", 1), ClusterDevice("c", 2)]
        >>> plan = allocate(**layers, cluster=Cluster(devices=tuple(three), bandwidth=10))
        >>> plan.by_layer, plan.bottleneck
        (('a', 'b', 'c', 'c'), 2.0)
        >>> after = allocate(**layers, cluster=Cluster(devices=tuple(three[1:]), bandwidth=10), before=plan)
        >>> after.by_layer, after.bottleneck, after.moved_bytes
        (('b', 'c', 'c', 'c'), 3.0, 20.0)

    Raises:
        ShardingError: no layers, lists of unequal lengths, bad numbers, another number of layers before, or layers that
            don't fit.

    References:
        Ao et al., "End-to-end Adaptive Distributed Training on PaddlePaddle", 2021 (2112.02752), which describes models
        and clusters in one form and plans again when resources change; the search is ours.
    """
    check_layers(ASKED, work=work, activation_bytes=activation_bytes, state_bytes=state_bytes)
    if not tolerance >= 0:
        raise ShardingError(f"{ASKED}(tolerance={tolerance})", required="0 or more")
    if before is not None and sum(before.sizes) != len(work):
        found = f"{sum(before.sizes)} layers before, {len(work)} now"
        raise ShardingError(f"{ASKED}(before)", found=found, required="the same layers")
    tables = _Tables(work, activation_bytes, state_bytes, cluster, before.by_layer if before else None)
    best = tables.least_bottleneck()
    if math.isinf(best):
        raise ShardingError(
            f"{ASKED}: {len(work)} layers on {len(cluster.devices)} devices",
            found=f"{sum(state_bytes):,.0f} bytes of state, the largest layer with {max(state_bytes):,.0f}",
            required="consecutive layers on each device that fit its memory",
            fix="more devices or memory",
        )
    stages, moved = tables.least_moved(best * (1 + tolerance))
    return Allocation(
        sizes=tuple(end - begin for begin, end, _ in stages),
        devices=tuple(cluster.devices[device].name for _, _, device in stages),
        bottleneck=tables.bottleneck(stages),
        moved_bytes=moved,
    )


class _Tables:
    """Times by device, and the dynamic programs over (devices in use, the last one, layers so far)."""

    def __init__(
        self,
        work: Sequence[float],
        activation_bytes: Sequence[float],
        state_bytes: Sequence[float],
        cluster: Cluster,
        before: Sequence[str] | None,
    ):
        self.layers, self.count = len(work), len(cluster.devices)
        sums, states = _table(work), _table(state_bytes)
        is_stage = np.triu(np.ones_like(sums, bool), 1)
        self.seconds = [
            np.where(is_stage & (states <= device.memory_bytes), sums / device.speed, np.inf)
            for device in cluster.devices
        ]
        """Of a stage, at [device][first layer, end]; inf if it has no layers or doesn't fit."""
        elsewhere = [
            [state * (name != device.name) for state, name in zip(state_bytes, before, strict=True)]
            if before
            else [0.0] * len(work)
            for device in cluster.devices
        ]
        self.moved = [_table(own) for own in elsewhere]
        """Bytes that a stage gets from elsewhere, likewise."""
        sent = np.array([0.0, *activation_bytes])
        self.transfers = [
            [2 * sent / cluster.between(a.name, b.name) for b in cluster.devices] for a in cluster.devices
        ]
        """To a stage, at [device before][device][first layer]."""

    def least_bottleneck(self) -> float:
        """The least of all stages and orders of devices."""
        best: dict[tuple[int, int], np.ndarray] = {}
        for used, device, earlier in self._steps():
            if not earlier:
                best[used, device] = self.seconds[device][0]
                continue
            ways = [np.maximum(best[used ^ 1 << device, last], self.transfers[last][device]) for last in earlier]
            best[used, device] = np.maximum(np.min(ways, axis=0)[:, None], self.seconds[device]).min(axis=0)
        return min(float(own[-1]) for own in best.values())

    def least_moved(self, slowest: float) -> tuple[list[tuple[int, int, int]], float]:
        """Stages (first layer, end, device), none slower than this, with the least bytes to move; and those."""
        best: dict[tuple[int, int], np.ndarray] = {}
        begins: dict[tuple[int, int], np.ndarray] = {}
        lasts: dict[tuple[int, int], np.ndarray] = {}
        for used, device, earlier in self._steps():
            moved = np.where(self.seconds[device] <= slowest, self.moved[device], np.inf)
            if not earlier:
                best[used, device] = moved[0]
                continue
            ways = np.array(
                [
                    np.where(self.transfers[last][device] <= slowest, best[used ^ 1 << device, last], np.inf)
                    for last in earlier
                ]
            )
            lasts[used, device] = np.array(earlier)[ways.argmin(axis=0)]
            total = ways.min(axis=0)[:, None] + moved
            begins[used, device], best[used, device] = total.argmin(axis=0), total.min(axis=0)
        used, device = min(best, key=lambda key: best[key][-1])
        least, end, stages = float(best[used, device][-1]), self.layers, []
        while (used, device) in begins:
            begin = int(begins[used, device][end])
            stages.append((begin, end, device))
            used, device, end = used ^ 1 << device, int(lasts[used, device][begin]), begin
        return [(0, end, device), *reversed(stages)], least

    def bottleneck(self, stages: Sequence[tuple[int, int, int]]) -> float:
        """The slowest stage or transfer."""
        times = [self.seconds[device][begin, end] for begin, end, device in stages]
        pairs = pairwise(stages)
        return float(max([*times, *(self.transfers[a][b][begin] for (_, _, a), (begin, _, b) in pairs)]))

    def _steps(self) -> Iterator[tuple[int, int, list[int]]]:
        """Sets of devices, smaller ones first, with each of them as the last one, and the others."""
        for used in range(1, 1 << self.count):
            # Of equals the first is kept: the given order of devices.
            own = [device for device in reversed(range(self.count)) if used >> device & 1]
            for device in own:
                yield used, device, [other for other in own if other != device]


def _table(values: Sequence[float]) -> np.ndarray:
    """Sums over layers at [first, end]; 0 where the end is not after the first."""
    table = np.zeros((len(values) + 1, len(values) + 1))
    for begin, sums in enumerate(run_sums(values)):
        table[begin, begin:] = sums
    return table
