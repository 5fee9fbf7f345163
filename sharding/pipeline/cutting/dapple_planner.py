"""DAPPLE's planner: stages and their devices for a step with a flush."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from heapq import heappop, heappush
from itertools import chain, count
from typing import NamedTuple

from ...errors import ShardingError
from ..task_table import check_positive
from .communication_times import Machines, all_reduce_time_per_byte, transfer_time_per_byte
from .even_stages import ranges
from .layer_costs import check_layers, run_sums
from .stage_placement import POLICIES, Policy, place
from .step_latency import Latency, Phase, latency


@dataclass(frozen=True, kw_only=True)
class PlacedCut:
    """Consecutive layers as stages, first to last, each data-parallel over its own devices."""

    sizes: tuple[int, ...]
    """Layers of each stage."""
    devices: tuple[tuple[int, ...], ...]
    """Of each stage, by index: device d is on machine d // (devices per machine)."""
    phases: tuple[Phase, ...]
    """Stages and the transfers between them, alternating: stage, transfer, stage, ..."""
    latency: Latency
    """Of a step; its pivot is the index of a phase."""

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage, counted from 0."""
        return ranges(self.sizes)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of devices of each stage."""
        return tuple(map(len, self.devices))


def dapple(
    forward: Sequence[float],
    *,
    backward: Sequence[float],
    activation_bytes: Sequence[float],
    weight_bytes: Sequence[float],
    machines: Machines,
    microbatches: int,
    policies: Sequence[Policy] = POLICIES,
) -> PlacedCut:
    """The stages and devices with the least ``latency`` of a step, with transfers as stages of their own.

    A stage on m devices takes 1/m of its layers' times per microbatch and all-reduces its gradients at the end. The
    search assigns devices stage by stage, with any of the policies for each; the last stage gets all remaining devices.
    Among partial plans for the same first layers, devices and last stage it keeps those that no other one dominates in
    everything that later stages depend on (see ``_Plan``) and whose lower bound is below the best full plan. This is
    exact, while the paper keeps a single partial plan. Takes seconds for tens of layers on tens of devices.

    Args:
        forward: forward time of each layer for one microbatch on one device.
        backward: backward time, likewise.
        activation_bytes: activations from each layer to the next for one microbatch; gradients are as large. The last
            entry is unused.
        weight_bytes: gradients of each layer.
        machines: all their devices are used.
        microbatches: per step.
        policies: candidates for the placement of each stage.

    Example:
        >>> pair = Machines(machines=2, devices=1, inside=100, between=1)
        >>> two = {"backward": [2, 2], "activation_bytes": [1, 0], "machines": pair, "microbatches": 8}
        >>> dapple([1, 1], weight_bytes=[2, 2], **two).replicas
        (2,)
        >>> plan = dapple([1, 1], weight_bytes=[50, 50], **two)
        >>> plan.devices, plan.latency.total
        (((0,), (1,)), 29.0)

    Raises:
            ShardingError: no layers, lists of unequal lengths, negative or non-finite numbers, no microbatches, unknown
            policies.

    References:
        Fan et al., DAPPLE, PPoPP 2021 (2007.01045), section 4.
    """
    asked = "cutting.dapple"
    check_layers(
        asked, forward=forward, backward=backward, activation_bytes=activation_bytes, weight_bytes=weight_bytes
    )
    check_positive(asked, microbatches=microbatches)
    if not policies or set(policies) - set(POLICIES):
        raise ShardingError(f"{asked}(policies)", found=f"{policies!r}", required=f"a non-empty subset of {POLICIES}")
    times = _Times(
        activation_bytes=activation_bytes,
        forward=run_sums(forward),
        backward=run_sums(backward),
        weight_bytes=run_sums(weight_bytes),
        transfer=cache(partial(transfer_time_per_byte, machines)),
        all_reduce=cache(partial(all_reduce_time_per_byte, machines)),
    )
    stages = _search(times, machines, microbatches, policies)
    phases = tuple(chain.from_iterable(times.phases(*pair) for pair in zip((None, *stages), stages, strict=False)))
    return PlacedCut(
        sizes=tuple(stage.end - stage.begin for stage in stages),
        devices=tuple(stage.devices for stage in stages),
        phases=phases,
        latency=latency(phases, microbatches=microbatches),
    )


class _Stage(NamedTuple):
    """Layers ``begin`` to ``end - 1`` and their devices."""

    begin: int
    end: int
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Times of stages and of the transfers between them; sums over layers are from ``run_sums``."""

    activation_bytes: Sequence[float]
    forward: list[list[float]]
    backward: list[list[float]]
    weight_bytes: list[list[float]]
    transfer: Callable[[tuple[int, ...], tuple[int, ...]], float]
    """Time per byte, between two stages' devices."""
    all_reduce: Callable[[tuple[int, ...]], float]
    """Time per byte, over a stage's devices."""

    def phases(self, before: _Stage | None, stage: _Stage) -> list[Phase]:
        """A stage, preceded by the transfer to it if another stage comes before."""
        begin, length, share = stage.begin, stage.end - stage.begin, len(stage.devices)
        own = Phase(
            self.forward[begin][length] / share,
            self.backward[begin][length] / share,
            self.weight_bytes[begin][length] * self.all_reduce(stage.devices),
        )
        if before is None:
            return [own]
        taken = self.activation_bytes[begin - 1] * self.transfer(before.devices, stage.devices)
        return [Phase(taken, taken), own]

    def phase_bounds(self, machines: Machines, begin: int, end: int, count: int) -> list[Phase]:
        """Lower bounds of the transfer to a stage and of the stage, on `count` devices in any placement."""
        fastest = max(machines.inside, machines.between)
        bandwidth = fastest if count <= machines.devices else machines.between
        length, taken = end - begin, self.activation_bytes[begin - 1] / count / fastest
        reduced = 2 * (count - 1) / count * self.weight_bytes[begin][length] / bandwidth
        own = Phase(self.forward[begin][length] / count, self.backward[begin][length] / count, reduced)
        return [Phase(taken, taken), own]


class _Plan(NamedTuple):
    """Stages for the first layers, and the times that determine a step with any later stages."""

    stages: tuple[_Stage, ...] = ()
    used: tuple[int, ...] = ()
    """Devices in use on each machine."""
    warmup: float = 0.0
    """Forward time of one microbatch through these stages."""
    round_trip: float = 0.0
    """Forward and backward time of one microbatch, until all gradients of these stages are reduced."""
    last_backward: float = -math.inf
    """Start of the last stage's last backward, for the pivot that makes it latest."""
    total: float = 0.0
    """Latency of a step with only these stages."""

    def extend(self, phase: Phase, microbatches: int) -> _Plan:
        """The plan's times with one more stage or transfer: ``latency``, computed incrementally."""
        steady = (microbatches - 1) * (phase.forward + phase.backward)
        round_trip = max(self.round_trip, self.warmup + phase.all_reduce) + phase.forward + phase.backward
        last_backward = self.last_backward - phase.backward
        return self._replace(
            warmup=self.warmup + phase.forward,
            round_trip=round_trip,
            last_backward=max(last_backward, self.warmup + phase.forward + steady),
            total=max(self.total, round_trip + steady, last_backward + phase.all_reduce),
        )

    def dominates(self, other: _Plan) -> bool:
        """Whether a step with this plan takes at most as long as with the other one, for any later stages."""
        return (
            self.total <= other.total
            and self.round_trip <= other.round_trip
            and self.last_backward <= other.last_backward
            and self.warmup <= other.warmup
        )


def _search(times: _Times, machines: Machines, microbatches: int, policies: Sequence[Policy]) -> tuple[_Stage, ...]:
    """The stages of the best plan, by best-first search with lower bounds."""
    layers = len(times.activation_bytes)
    choices = cache(partial(_choices, machines, policies))
    later = _later_bounds(times, machines, microbatches)

    def extended(plan: _Plan, end: int, devices: tuple[int, ...]) -> _Plan:
        before = plan.stages[-1] if plan.stages else None
        stage = _Stage(before.end if before else 0, end, devices)
        for phase in times.phases(before, stage):
            plan = plan.extend(phase, microbatches)
        counts = Counter(device // machines.devices for device in devices)
        used = tuple(busy + counts[machine] for machine, busy in enumerate(plan.used))
        return plan._replace(stages=(*plan.stages, stage), used=used)

    def lower_bound(plan: _Plan) -> float:
        """Lower bound of all full plans that extend this one."""
        rest = later[plan.stages[-1].end][machines.total - sum(plan.used)]
        return max(plan.total, plan.round_trip + rest.round_trip, plan.warmup + rest.total)

    start = _Plan(used=(0,) * machines.machines)
    best = extended(start, layers, tuple(range(machines.total)))
    found = defaultdict[tuple[object, ...], list[_Plan]](list)
    heap = [(0.0, 0, start)]
    number = count(1)
    while heap and heap[0][0] < best.total:
        plan = heappop(heap)[-1]
        begin = plan.stages[-1].end if plan.stages else 0
        if plan.stages and plan not in found[begin, plan.used, plan.stages[-1].devices]:
            continue  # dominated in the meantime
        for devices in choices(plan.used):
            for end in range(begin + 1, layers):
                longer = extended(plan, end, devices)
                bound = lower_bound(longer)
                rivals = found[end, longer.used, devices]
                if bound >= best.total or any(rival.dominates(longer) for rival in rivals):
                    continue
                complete = extended(longer, layers, place("append-first", machines, longer.used, machines.total))
                best = min(best, complete, key=lambda one: one.total)
                rivals[:] = [*(rival for rival in rivals if not longer.dominates(rival)), longer]
                heappush(heap, (bound, next(number), longer))
    return best.stages


class _LaterBound(NamedTuple):
    """Lower bounds for the stages from a layer on, with the transfer to them."""

    round_trip: float = 0.0
    """Of all microbatches, forward and backward."""
    total: float = 0.0
    """The same, until the gradients of these stages are reduced."""


def _later_bounds(times: _Times, machines: Machines, microbatches: int) -> list[list[_LaterBound]]:
    """Lower bounds at [layer][number of devices], each minimised separately over the stage from there and later ones.

    Assumes the fastest links possible for the number of devices.
    """
    layers = len(times.activation_bytes)
    never = _LaterBound(math.inf, math.inf)
    later = [*([never] * (machines.total + 1) for _ in range(layers)), [_LaterBound()] + [never] * machines.total]
    for begin in range(layers - 1, 0, -1):
        for left in range(1, machines.total + 1):
            options = [
                _prepended(later[end][left - share], times.phase_bounds(machines, begin, end, share), microbatches)
                for share in range(1, left + 1)
                for end in (range(begin + 1, layers) if share < left else [layers])
            ]
            later[begin][left] = _LaterBound(*map(min, zip(*options, strict=True)))
    return later


def _prepended(later: _LaterBound, phases: Sequence[Phase], microbatches: int) -> _LaterBound:
    """Lower bounds of later stages with a transfer and a stage prepended."""
    for phase in reversed(phases):
        both = phase.forward + phase.backward
        round_trip = max(both + later.round_trip, microbatches * both)
        later = _LaterBound(
            round_trip, max(round_trip, phase.forward + later.total, microbatches * both + phase.all_reduce)
        )
    return later


def _choices(machines: Machines, policies: Sequence[Policy], used: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All device sets that a stage can get while leaving at least one device for the next."""
    counts = range(1, machines.total - sum(used))
    return list(dict.fromkeys(place(policy, machines, used, count) for count in counts for policy in policies))
