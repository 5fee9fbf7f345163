"""Alpa's planner: stages and the submesh of each for a step with a flush."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import ShardingError
from ..task_table import check_positive
from .even_stages import ranges

ASKED = "cutting.alpa"
LEAST_GAP = 1e-6
"""Between slowest stages that are tried, as a part of the time of a step."""


class Submesh(NamedTuple):
    """Devices of a stage: some of one host's, or all of several hosts'."""

    hosts: int
    devices: int
    """Per host."""

    @property
    def size(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices


@dataclass(frozen=True, kw_only=True)
class SubmeshCut:
    """Consecutive layers as stages, first to last, each on a submesh."""

    sizes: tuple[int, ...]
    """Layers of each stage."""
    submeshes: tuple[Submesh, ...]
    devices: tuple[tuple[int, ...], ...]
    """Of each stage, by index: device d is on host d // (devices per host)."""
    seconds: tuple[float, ...]
    """Of each stage for one microbatch."""
    total: float
    """Of a step: the sum of all stages' times, and the slowest's for each further microbatch."""

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage, counted from 0."""
        return ranges(self.sizes)


def submeshes(hosts: int, devices: int) -> tuple[Submesh, ...]:
    """1, 2, 4... devices of a host, and all devices of 2, 3... hosts.

    Any of them with as many devices as the whole fill it: the largest first, each leaves aligned room.

    Example:
        >>> [tuple(mesh) for mesh in submeshes(2, 4)]
        [(1, 1), (1, 2), (1, 4), (2, 4)]

    Raises:
        ShardingError: the devices of a host are no power of two.
    """
    check_positive(ASKED, hosts=hosts, devices=devices)
    if devices & (devices - 1):
        raise ShardingError(f"{ASKED}(devices={devices})", required="a power of two per host, so that submeshes fit")
    parts = [Submesh(1, 1 << p) for p in range(devices.bit_length())]
    return (*parts, *(Submesh(count, devices) for count in range(2, hosts + 1)))


def alpa(
    stage_seconds: Callable[[range, Submesh], float],
    *,
    layers: int,
    hosts: int,
    devices: int,
    microbatches: int,
    most_later_stages: Callable[[range, Submesh], float] | None = None,
) -> SubmeshCut:
    """The stages and submeshes with the least time of a step, all devices in use.

    With t the time of layers k..i-1 on a submesh m, F(s, k, d) the least sum of times of s stages for the layers from k
    on, on d devices, none slower than t_max, and B microbatches:

        F(s, k, d) = min over i, m with t <= t_max of t + F(s - 1, i, d - size of m),      F(0, layers, 0) = 0
        total = min over t_max of min over s of F(s, 0, all) + (B - 1) t_max

    t_max is tried in ascending order until B t_max alone is more than the best total. Exact, up to gaps of `LEAST_GAP`.
    Takes layers^3 devices submeshes steps for each t_max.

    Args:
        stage_seconds: of layers as one stage, for one microbatch, with all that happens within the submesh; inf if
            impossible. Called once for every range of layers and submesh.
        layers: in model order; layers that belong together are best clustered before.
        hosts: all are used.
        devices: per host, a power of two.
        microbatches: per step.
        most_later_stages: how many stages may follow one with these layers, each of which adds a microbatch in flight
            to its memory: `(memory - weights) / activations - 1`; negative if it doesn't fit at all. None is any.

    Example:
        >>> work = [3, 1, 4, 1, 5, 9]
        >>> def seconds(own: range, mesh: Submesh) -> float:
        ...     return sum(work[own.start : own.stop]) / mesh.size + 0.25 * len(own) * (mesh.size.bit_length() - 1)
        >>> plan = alpa(seconds, layers=6, hosts=1, devices=4, microbatches=16)
        >>> plan.sizes, [mesh.size for mesh in plan.submeshes], plan.total
        ((4, 2), [2, 2], 125.5)

    Raises:
        ShardingError: numbers that aren't positive, devices that are no power of two, or no stages are possible.

    References:
        Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022
        (2201.12023), section 5.2.
    """
    check_positive(ASKED, layers=layers, microbatches=microbatches)
    meshes = submeshes(hosts, devices)
    runs = [(k, i) for k in range(layers) for i in range(k + 1, layers + 1)]
    keys = [(k, i, number) for k, i in runs for number in range(len(meshes))]
    times = {key: float(stage_seconds(range(*key[:2]), meshes[key[2]])) for key in keys}
    if bad := [key for key, time in times.items() if not time >= 0]:
        k, i, number = bad[0]
        asked = f"{ASKED}: stage_seconds({range(k, i)}, {meshes[number]})"
        raise ShardingError(asked, found=f"{times[bad[0]]}", required="a non-negative number, or inf")
    later = dict.fromkeys(keys, layers)
    if most_later_stages is not None:
        most = {key: most_later_stages(range(*key[:2]), meshes[key[2]]) for key in keys}
        later = {key: math.floor(max(-1.0, min(layers, number))) for key, number in most.items()}
    table = _Table(layers, hosts * devices, [mesh.size for mesh in meshes], times, later)
    best, stages = math.inf, []
    tried = -math.inf
    for slowest in sorted(time for time in set(times.values()) if math.isfinite(time)):
        if microbatches * slowest >= best:
            break
        if slowest - tried < LEAST_GAP * best and math.isfinite(best):
            continue
        tried = slowest
        total, found = table.least(slowest)
        if found:
            total += (microbatches - 1) * max(times[key] for key in found)
            if total < best:
                best, stages = total, found
    if not stages:
        raise ShardingError(
            f"{ASKED}(layers={layers}, hosts={hosts}, devices={devices})",
            found="no stages of finite time that fit the memory and use all devices",
            required="stages for all layers",
            fix="fewer devices, or layers that take less memory",
        )
    chosen = tuple(meshes[number] for _, _, number in stages)
    return SubmeshCut(
        sizes=tuple(i - k for k, i, _ in stages),
        submeshes=chosen,
        devices=_laid_out(chosen, hosts, devices),
        seconds=tuple(times[key] for key in stages),
        total=best,
    )


class _Table:
    """F for one slowest stage at a time; stages are (first layer, end, number of the submesh)."""

    def __init__(
        self,
        layers: int,
        devices: int,
        sizes: Sequence[int],
        times: dict[tuple[int, int, int], float],
        later: dict[tuple[int, int, int], int],
    ):
        self.layers, self.devices, self.sizes = layers, devices, sizes
        self.times, self.later = times, later

    def least(self, slowest: float) -> tuple[float, list[tuple[int, int, int]]]:
        """The least sum of times with no stage slower than this, and its stages; none if there are none."""
        best = np.full((self.layers + 1, self.layers + 1, self.devices + 1), np.inf)  # F at [k, s, d]
        best[self.layers, 0, 0] = 0.0
        back = np.zeros((*best.shape, 2), np.int64)
        for k, i, number in sorted(self.times, key=lambda key: -key[0]):
            time, size = self.times[k, i, number], self.sizes[number]
            # A stage that is the s-th from the end has s - 1 later ones.
            most = min(self.later[k, i, number] + 1, self.layers)
            if time > slowest or most < 1 or size > self.devices:
                continue
            ways = best[i, :most, : self.devices + 1 - size] + time
            own = best[k, 1 : most + 1, size:]
            is_better = ways < own
            own[is_better] = ways[is_better]
            back[k, 1 : most + 1, size:][is_better] = i, number
        count = int(best[0, :, self.devices].argmin())
        total = float(best[0, count, self.devices])
        stages: list[tuple[int, int, int]] = []
        k, d = 0, self.devices
        while math.isfinite(total) and k < self.layers:
            i, number = back[k, count, d].tolist()
            stages.append((k, i, number))
            k, count, d = i, count - 1, d - self.sizes[number]
        return total, stages


def _laid_out(chosen: Sequence[Submesh], hosts: int, devices: int) -> tuple[tuple[int, ...], ...]:
    """Device indices of submeshes that fill all hosts, the largest laid out first."""
    found: dict[int, tuple[int, ...]] = {}
    start = 0
    for stage in sorted(range(len(chosen)), key=lambda stage: -chosen[stage].size):
        found[stage] = tuple(range(start, start + chosen[stage].size))
        start += chosen[stage].size
    assert start == hosts * devices  # all devices are in use
    return tuple(found[stage] for stage in range(len(chosen)))
