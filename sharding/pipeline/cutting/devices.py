"""Machines of devices with fast links inside and slow ones between: where a stage goes, and what its transfers take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..table import at_least_one
from .layers import check_bandwidths

Policy = Literal["fresh-first", "append-first", "scatter-first"]
"""Where a stage's devices come from: machines that nothing is on yet; machines in use, so that none is left half empty;
all machines in use alike, or all there are where none is."""

POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Equal machines; device d is on machine d // devices."""

    machines: int
    devices: int
    """Of each machine."""
    inside: float
    """Bandwidth of a device to others of its machine, in bytes per unit of time."""
    between: float
    """Bandwidth of a device to those of other machines."""

    def __post_init__(self) -> None:
        at_least_one("cutting.Machines", machines=self.machines, devices=self.devices)
        check_bandwidths("cutting.Machines", inside=self.inside, between=self.between)

    @property
    def total(self) -> int:
        """Devices of all machines."""
        return self.machines * self.devices

    def bandwidth(self, *devices: int) -> float:
        """Of the links of these devices to each other: ``inside`` where all are on one machine."""
        return self.inside if len({device // self.devices for device in devices}) == 1 else self.between


def place(policy: Policy, machines: Machines, used: Sequence[int], count: int) -> tuple[int, ...]:
    """The devices that a stage gets, by number; a machine gives its lowest ones first.

    Args:
        policy: see ``Policy``.
        machines: with at least ``count`` free devices.
        used: devices of each machine that have a stage.
        count: of devices.
    """
    free = [
        [machine * machines.devices + device for device in range(busy, machines.devices)]
        for machine, busy in enumerate(used)
    ]
    fresh = [devices for devices, busy in zip(free, used, strict=True) if not busy]
    begun = [devices for devices, busy in zip(free, used, strict=True) if busy]
    ordered = {
        "fresh-first": [*_filled(fresh), *_filled(begun)],
        "append-first": [*_filled(begun), *_filled(fresh)],
        "scatter-first": [*_dealt(begun), *_dealt(fresh)],
    }
    return tuple(sorted(ordered[policy][:count]))


def transfer_time_per_byte(machines: Machines, senders: Sequence[int], receivers: Sequence[int]) -> float:
    """What a byte of a microbatch takes from one stage to another, or its gradient back.

    Each device of a stage has an equal part of the microbatch, in their order, and sends what others have of it. All
    links work at a time and the busiest device's decide.
    """
    whole = len(senders) * len(receivers)
    busy = dict.fromkeys([*senders, *receivers], 0.0)  # times ``whole``
    for i, sender in enumerate(senders):
        for j, receiver in enumerate(receivers):
            common = min((i + 1) * len(receivers), (j + 1) * len(senders)) - max(i * len(receivers), j * len(senders))
            if common > 0:
                busy[sender] += common / machines.bandwidth(sender, receiver)
                busy[receiver] += common / machines.bandwidth(sender, receiver)
    return max(busy.values()) / whole


def all_reduce_time_per_byte(machines: Machines, devices: Sequence[int]) -> float:
    """What a byte of gradients takes in a ring over a stage's devices: 2 (m - 1) / m of it over each link."""
    return 2 * (len(devices) - 1) / len(devices) / machines.bandwidth(*devices)


def _filled(free: Iterable[Sequence[int]]) -> list[int]:
    """All devices, machine by machine."""
    return [device for devices in free for device in devices]


def _dealt(free: Sequence[Sequence[int]]) -> list[int]:
    """All devices, one of each machine in turn."""
    longest = max(map(len, free), default=0)
    return [devices[turn] for turn in range(longest) for devices in free if turn < len(devices)]
