"""Piper's planner: stages of any graph of layers, each with its own data and tensor degree, and a choice per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import ShardingError, raise_together
from ..task_table import check_positive
from .downsets import Edges, check_edges, downsets, members
from .layer_costs import check_bandwidths, check_layers

ASKED = "cutting.piper"


class LayerOption(NamedTuple):
    """A way to run a layer on a number of devices: sharded somehow, with or without recomputation."""

    tensor: int
    """Devices that share the layer."""
    seconds: float
    """Forward and backward of one microbatch, with the communication within these devices."""
    weight_bytes: float
    """Gradients per device, which data parallelism reduces."""
    activation_bytes: float
    """Per device, for each microbatch in flight."""
    fixed_bytes: float
    """Per device: weights, gradients, optimizer state."""
    received_bytes: float = 0.0
    """For each edge from another stage, beyond the edge's own bytes: what the devices exchange before they run it."""
    sent_bytes: float = 0.0
    """For each edge to another stage, likewise."""


class HybridStage(NamedTuple):
    """Layers that are sharded over `tensor` devices, replicated `data` times."""

    layers: tuple[int, ...]
    data: int
    tensor: int
    options: tuple[int, ...]
    """Of each layer, the index among its options."""


@dataclass(frozen=True, kw_only=True)
class HybridCut:
    """Stages in pipeline order."""

    stages: tuple[HybridStage, ...]
    bottleneck: float
    """Time per microbatch in the steady state: that of the slowest stage, with its transfers and reductions."""

    @property
    def devices(self) -> int:
        """Devices in use."""
        return sum(stage.data * stage.tensor for stage in self.stages)


def piper(
    options: Sequence[Sequence[LayerOption]],
    *,
    edges: Edges,
    edge_bytes: Sequence[float],
    devices: int,
    microbatches: int,
    bandwidth: float,
    memory_bytes: float = math.inf,
) -> HybridCut:
    """The stages, degrees and options with the least time per microbatch of a 1F1B pipeline.

    A stage with data degree d and tensor degree t takes, per microbatch, the sum over its layers of

        seconds / d + (2 (edge bytes + received) / d over edges from other stages
                       + 2 (edge bytes + sent) / d over edges to other stages
                       + 4 (d - 1) / d weight bytes / microbatches) / bandwidth

    and keeps, of each layer, activations of ceil(s / d) microbatches, where s is the sum of the data degrees of this
    and all later stages. With D and E downsets of the layers, the best stages for the layers outside D are

        best(D, k, s) = min over E with D in E, d, t of max(best(E, k - d t, s - d), time of E - D with d, t, s)

    where the options of the stage's layers have the least time that fits the memory. Exact, options included: sums of
    time and memory that others dominate are dropped. Takes downsets^2 data degrees^2 tensor degrees devices steps.

    Args:
        options: of each layer; degrees that a stage may have are those that all its layers have.
        edges: (layer, layer that reads its result).
        edge_bytes: of each edge, for one microbatch.
        devices: to use at most.
        microbatches: per step; data degrees divide it.
        bandwidth: in bytes per unit of time.
        memory_bytes: of a device.

    Example:
        >>> layer = [LayerOption(1, 4, 10, 6, 20), LayerOption(2, 2.5, 5, 3, 10)]
        >>> cut = piper([layer] * 2, edges=[(0, 1)], edge_bytes=[1], devices=4, microbatches=8, bandwidth=10)
        >>> cut.bottleneck, [(stage.data, stage.tensor) for stage in cut.stages]
        (2.35, [(2, 1), (2, 1)])

    Raises:
        ShardingError: no layers or options, bad numbers, a cycle, too many downsets, or nothing fits.

    References:
        Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021,
        section 4. Deviation: a stage's options are exact, not by the paper's heuristic.
    """
    _check(options, edges, edge_bytes, devices, microbatches, bandwidth, memory_bytes)
    costs = _StageCosts(options, edges, edge_bytes, microbatches, bandwidth, memory_bytes)
    found = downsets(ASKED, len(options), edges)
    most = min(devices, microbatches)
    degrees = [d for d in range(1, most + 1) if microbatches % d == 0]
    best = np.full((len(found), devices + 1, most + 1), np.inf)
    best[-1, 0, 0] = 0.0
    # The next downset, degrees, and microbatches in flight.
    back = np.zeros((*best.shape, 4), np.int64)
    for at in range(len(found) - 2, -1, -1):
        for after in range(at + 1, len(found)):
            if found[at] & ~found[after]:
                continue
            layers = members(found[after] & ~found[at])
            for tensor in costs.tensor_degrees(layers):
                for data in (d for d in degrees if d * tensor <= devices):
                    used = data * tensor
                    for total in range(data, most + 1):
                        flight = -(-total // data)
                        earlier = best[after, : devices + 1 - used, total - data]
                        if not np.isfinite(earlier).any():
                            continue
                        ways = np.maximum(earlier, costs.time(layers, tensor, data, flight))
                        better = np.flatnonzero(ways < best[at, used:, total])
                        best[at, used + better, total] = ways[better]
                        back[at, used + better, total] = after, data, tensor, flight
    k, s = np.unravel_index(best[0].argmin(), best[0].shape)
    if math.isinf(bottleneck := float(best[0, k, s])):
        raise ShardingError(
            f"{ASKED}(devices={devices}, memory_bytes={memory_bytes:,.0f})",
            found="no stages whose layers fit, whatever their degrees and options",
            required="layers that fit the devices' memory",
            fix="more devices or memory_bytes, or options that take less",
        )
    stages, at = [], 0
    while at < len(found) - 1:
        after, data, tensor, flight = back[at, k, s].tolist()
        layers = members(found[after] & ~found[at])
        stages.append(HybridStage(layers, data, tensor, costs.best(layers, tensor, data, flight).options))
        at, k, s = after, k - data * tensor, s - data
    return HybridCut(stages=tuple(stages), bottleneck=bottleneck)


class _Way(NamedTuple):
    """Options of a stage's layers."""

    time: float
    num_bytes: float
    options: tuple[int, ...]


class _StageCosts:
    """Times of stages, each with the best options that fit."""

    def __init__(
        self,
        options: Sequence[Sequence[LayerOption]],
        edges: Edges,
        edge_bytes: Sequence[float],
        microbatches: int,
        bandwidth: float,
        memory_bytes: float,
    ):
        self.options, self.sizes = options, list(zip(edges, edge_bytes, strict=True))
        self.microbatches, self.bandwidth, self.memory_bytes = microbatches, bandwidth, memory_bytes
        self.known: dict[tuple[tuple[int, ...], int, int, int], _Way] = {}

    def tensor_degrees(self, layers: tuple[int, ...]) -> list[int]:
        """Degrees that all layers have an option for."""
        return sorted(set.intersection(*({option.tensor for option in self.options[layer]} for layer in layers)))

    def time(self, layers: tuple[int, ...], tensor: int, data: int, flight: int) -> float:
        """Per microbatch; inf if the layers don't fit."""
        return self.best(layers, tensor, data, flight).time

    def best(self, layers: tuple[int, ...], tensor: int, data: int, flight: int) -> _Way:
        """The fastest options that fit with some microbatches in flight."""
        key = layers, tensor, data, flight
        if key not in self.known:
            self.known[key] = self._fastest([self._ways(layer, layers, tensor, data, flight) for layer in layers])
        return self.known[key]

    def _ways(self, layer: int, layers: tuple[int, ...], tensor: int, data: int, flight: int) -> list[_Way]:
        """A layer's options of a degree, in a stage."""
        inside = set(layers)
        received = [size for (u, v), size in self.sizes if v == layer and u not in inside]
        sent = [size for (u, v), size in self.sizes if u == layer and v not in inside]
        found = []
        for number, option in enumerate(self.options[layer]):
            if option.tensor == tensor:
                moved = sum(received) + len(received) * option.received_bytes
                moved += sum(sent) + len(sent) * option.sent_bytes
                reduced = 4 * (data - 1) / data * option.weight_bytes / self.microbatches
                time = option.seconds / data + (2 * moved / data + reduced) / self.bandwidth
                found.append(_Way(time, option.activation_bytes * flight + option.fixed_bytes, (number,)))
        return found

    def _fastest(self, choices: list[list[_Way]]) -> _Way:
        """One way of each layer, with the least sum of times within the memory."""
        sums = [_Way(0.0, 0.0, ())]
        smallest = [min(way.num_bytes for way in ways) for ways in choices]
        for number, ways in enumerate(choices):
            left = self.memory_bytes - sum(smallest[number + 1 :])
            pairs = [
                _Way(one.time + way.time, one.num_bytes + way.num_bytes, one.options + way.options)
                for one in sums
                for way in ways
                if one.num_bytes + way.num_bytes <= left
            ]
            sums = []
            for way in sorted(pairs):
                if not sums or way.num_bytes < sums[-1].num_bytes:
                    sums.append(way)
        return sums[0] if sums else _Way(math.inf, math.inf, ())


def _check(
    options: Sequence[Sequence[LayerOption]],
    edges: Edges,
    edge_bytes: Sequence[float],
    devices: int,
    microbatches: int,
    bandwidth: float,
    memory_bytes: float,
) -> None:
    check_positive(ASKED, devices=devices, microbatches=microbatches)
    check_bandwidths(ASKED, bandwidth=bandwidth)
    if not memory_bytes > 0:
        raise ShardingError(f"{ASKED}(memory_bytes={memory_bytes})", required="a positive number of bytes")
    if not options or not all(options):
        raise ShardingError(f"{ASKED}(options)", found="no layers, or a layer without", required="at least one each")
    check_edges(ASKED, len(options), edges)
    if len(edge_bytes) != len(edges):
        found = f"{len(edge_bytes)} numbers, {len(edges)} edges"
        raise ShardingError(f"{ASKED}(edge_bytes)", found=found, required="one per edge")
    if edges:
        check_layers(ASKED, edge_bytes=edge_bytes)
    bad = [
        ShardingError(
            f"{ASKED}(options[{layer}][{number}])", found=f"{option}", required="finite, non-negative numbers"
        )
        for layer, own in enumerate(options)
        for number, option in enumerate(own)
        if not (option.tensor >= 1 and all(math.isfinite(value) and value >= 0 for value in option))
    ]
    raise_together(ASKED, bad)
