"""Stages and the devices of each for a step with a flush: DAPPLE's planner."""

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
from ..table import at_least_one
from .balance import ranges
from .devices import POLICIES, Machines, Policy, all_reduce_time_per_byte, place, transfer_time_per_byte
from .latency import Latency, Phase, latency
from .layers import check_layers, run_sums


@dataclass(frozen=True, kw_only=True)
class PlacedCut:
    """Consecutive layers as stages, first to last, each on devices of its own, which share every microbatch."""

    sizes: tuple[int, ...]
    """Layers of each stage."""
    devices: tuple[tuple[int, ...], ...]
    """Of each stage, by number: device d is on machine d // (devices of a machine)."""
    phases: tuple[Phase, ...]
    """Stages and the transfers between them in turn: stage, transfer, stage, ..."""
    latency: Latency
    """Of a step; its pivot is one of the phases."""

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage, counted from 0."""
        return ranges(self.sizes)

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many devices each stage has."""
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
    """The stages and devices for which a step takes the least ``latency``, transfers counted as stages.

    A stage of m devices takes 1/m of its layers' times for a microbatch, which they share, and all-reduces gradients at
    the end. Plans are those that come of giving the stages their devices one after the other, by any of the policies
    each, the last one all that are left. Of the plans so far for the first layers, on the same devices with the same
    last stage, only those are followed up that no other one beats in all that later stages depend on (see ``_Plan``),
    and that can still beat the best whole plan: exact, while the paper keeps one. Takes seconds for tens of layers on
    tens of devices.

    Args:
        forward: time of each layer for one microbatch on one device.
        backward: the same backward.
        activation_bytes: of what each layer hands to the next for one microbatch; as many come back. The last: unused.
        weight_bytes: gradients of each layer.
        machines: whose devices are all used.
        microbatches: of a step.
        policies: by which stages may get their devices.

    Example:
        >>> pair = Machines(machines=2, devices=1, inside=100, between=1)
        >>> two = {"backward": [2, 2], "activation_bytes": [1, 0], "machines": pair, "microbatches": 8}
        >>> dapple([1, 1], weight_bytes=[2, 2], **two).replicas
        (2,)
        >>> plan = dapple([1, 1], weight_bytes=[50, 50], **two)
        >>> plan.devices, plan.latency.total
        (((0,), (1,)), 29.0)

    Raises:
        ShardingError: no layers, lists that are not equally long, numbers that are negative or not finite, no
            microbatches, policies that aren't.

    References:
        Fan et al., DAPPLE, PPoPP 2021 (2007.01045), section 4.
    """
    asked = "cutting.dapple"
    check_layers(
        asked, forward=forward, backward=backward, activation_bytes=activation_bytes, weight_bytes=weight_bytes
    )
    at_least_one(asked, microbatches=microbatches)
    if not policies or set(policies) - set(POLICIES):
        raise ShardingError(f"{asked}(policies)", there=f"{policies!r}", must=f"some of {POLICIES}")
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
    """Layers ``begin`` to ``end - 1`` on devices."""

    begin: int
    end: int
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Times:
    """What stages and the transfers between them take; sums over layers are as in ``run_sums``."""

    activation_bytes: Sequence[float]
    forward: list[list[float]]
    backward: list[list[float]]
    weight_bytes: list[list[float]]
    transfer: Callable[[tuple[int, ...], tuple[int, ...]], float]
    """Per byte, from devices to devices."""
    all_reduce: Callable[[tuple[int, ...]], float]
    """Per byte, over devices."""

    def phases(self, before: _Stage | None, stage: _Stage) -> list[Phase]:
        """A stage, and first the transfer to it where one is before."""
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

    def least_phases(self, machines: Machines, begin: int, end: int, count: int) -> list[Phase]:
        """The transfer to a stage and the stage, on so many devices, wherever they are and those before."""
        fastest = max(machines.inside, machines.between)
        bandwidth = fastest if count <= machines.devices else machines.between
        length, taken = end - begin, self.activation_bytes[begin - 1] / count / fastest
        reduced = 2 * (count - 1) / count * self.weight_bytes[begin][length] / bandwidth
        own = Phase(self.forward[begin][length] / count, self.backward[begin][length] / count, reduced)
        return [Phase(taken, taken), own]


class _Plan(NamedTuple):
    """Stages for the first layers, and the times on which a step with any later stages depends."""

    stages: tuple[_Stage, ...] = ()
    used: tuple[int, ...] = ()
    """Devices of each machine."""
    warmup: float = 0.0
    """Of one microbatch forward through these stages."""
    round_trip: float = 0.0
    """The same and back, until all their gradients are there."""
    last_backward: float = -math.inf
    """When the last stage begins its last backward, by the pivot for which that is latest."""
    total: float = 0.0
    """The latency of a step with only these stages."""

    def then(self, phase: Phase, microbatches: int) -> _Plan:
        """The times with one more stage or transfer; stage by stage what ``latency`` says of the whole."""
        steady = (microbatches - 1) * (phase.forward + phase.backward)
        round_trip = max(self.round_trip, self.warmup + phase.all_reduce) + phase.forward + phase.backward
        last_backward = self.last_backward - phase.backward
        return self._replace(
            warmup=self.warmup + phase.forward,
            round_trip=round_trip,
            last_backward=max(last_backward, self.warmup + phase.forward + steady),
            total=max(self.total, round_trip + steady, last_backward + phase.all_reduce),
        )

    def beats(self, other: _Plan) -> bool:
        """Whether a step with this and any later stages takes no longer than with the other one and the same."""
        return (
            self.total <= other.total
            and self.round_trip <= other.round_trip
            and self.last_backward <= other.last_backward
            and self.warmup <= other.warmup
        )


def _search(times: _Times, machines: Machines, microbatches: int, policies: Sequence[Policy]) -> tuple[_Stage, ...]:
    """The stages of the best plan: always goes on with the one that may become the best, until a whole one is."""
    layers = len(times.activation_bytes)
    choices = cache(partial(_choices, machines, policies))
    later = _least_later(times, machines, microbatches)

    def extended(plan: _Plan, end: int, devices: tuple[int, ...]) -> _Plan:
        before = plan.stages[-1] if plan.stages else None
        stage = _Stage(before.end if before else 0, end, devices)
        for phase in times.phases(before, stage):
            plan = plan.then(phase, microbatches)
        counts = Counter(device // machines.devices for device in devices)
        used = tuple(busy + counts[machine] for machine, busy in enumerate(plan.used))
        return plan._replace(stages=(*plan.stages, stage), used=used)

    def least(plan: _Plan) -> float:
        """No whole plan that begins so takes less."""
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
            continue  # beaten since
        for devices in choices(plan.used):
            for end in range(begin + 1, layers):
                longer = extended(plan, end, devices)
                bound = least(longer)
                rivals = found[end, longer.used, devices]
                if bound >= best.total or any(rival.beats(longer) for rival in rivals):
                    continue
                whole = extended(longer, layers, place("append-first", machines, longer.used, machines.total))
                best = min(best, whole, key=lambda one: one.total)
                rivals[:] = [*(rival for rival in rivals if not longer.beats(rival)), longer]
                heappush(heap, (bound, next(number), longer))
    return best.stages


class _Later(NamedTuple):
    """What the stages from a layer on take at least, with the transfer to them."""

    round_trip: float = 0.0
    """Of all microbatches, forward and back."""
    total: float = 0.0
    """The same, until these stages' gradients are there."""


def _least_later(times: _Times, machines: Machines, microbatches: int) -> list[list[_Later]]:
    """At [layer][devices], least over the stage from there on and what follows it, the two parts each by itself.

    Links are taken to be as fast as those of so many devices can be.
    """
    layers = len(times.activation_bytes)
    never = _Later(math.inf, math.inf)
    later = [*([never] * (machines.total + 1) for _ in range(layers)), [_Later()] + [never] * machines.total]
    for begin in range(layers - 1, 0, -1):
        for left in range(1, machines.total + 1):
            options = [
                _prepended(later[end][left - share], times.least_phases(machines, begin, end, share), microbatches)
                for share in range(1, left + 1)
                for end in (range(begin + 1, layers) if share < left else [layers])
            ]
            later[begin][left] = _Later(*map(min, zip(*options, strict=True)))
    return later


def _prepended(later: _Later, phases: Sequence[Phase], microbatches: int) -> _Later:
    """What later stages take at least, with a transfer and a stage before them."""
    for phase in reversed(phases):
        both = phase.forward + phase.backward
        round_trip = max(both + later.round_trip, microbatches * both)
        later = _Later(round_trip, max(round_trip, phase.forward + later.total, microbatches * both + phase.all_reduce))
    return later


def _choices(machines: Machines, policies: Sequence[Policy], used: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All devices that a stage can get where at least one is left for the next."""
    counts = range(1, machines.total - sum(used))
    return list(dict.fromkeys(place(policy, machines, used, count) for count in counts for policy in policies))
