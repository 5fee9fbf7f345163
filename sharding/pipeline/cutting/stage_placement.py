"""The devices that a stage gets, by DAPPLE's placement policies (Fan et al., PPoPP 2021, section 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from .communication_times import Machines

Policy = Literal["fresh-first", "append-first", "scatter-first"]
"""How a stage gets devices: from unused machines; from machines in use, to fill them up; evenly from all machines in
use, or from all machines if none is."""

POLICIES: tuple[Policy, ...] = get_args(Policy)


def place(policy: Policy, machines: Machines, used: Sequence[int], count: int) -> tuple[int, ...]:
    """The device indices of a stage; each machine gives its lowest free ones first.

    Args:
        policy: see ``Policy``.
        machines: with at least ``count`` free devices.
        used: number of devices in use on each machine.
        count: number of devices.
    """
    free = [
        [machine * machines.devices + device for device in range(busy, machines.devices)]
        for machine, busy in enumerate(used)
    ]
    fresh = [devices for devices, busy in zip(free, used, strict=True) if not busy]
    partly_used = [devices for devices, busy in zip(free, used, strict=True) if busy]
    ordered = {
        "fresh-first": [*_by_machine(fresh), *_by_machine(partly_used)],
        "append-first": [*_by_machine(partly_used), *_by_machine(fresh)],
        "scatter-first": [*_round_robin(partly_used), *_round_robin(fresh)],
    }
    return tuple(sorted(ordered[policy][:count]))


def _by_machine(free: Iterable[Sequence[int]]) -> list[int]:
    """All devices, machine by machine."""
    return [device for devices in free for device in devices]


def _round_robin(free: Sequence[Sequence[int]]) -> list[int]:
    """All devices, round-robin over the machines."""
    longest = max(map(len, free), default=0)
    return [devices[turn] for turn in range(longest) for devices in free if turn < len(devices)]
