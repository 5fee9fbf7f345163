"""Two pipelines in opposite directions over the same devices: Chimera."""

from __future__ import annotations

from typing import Literal

from ...errors import ShardingError
from ..schedule import Schedule
from ..table import Kind, Task, at_least_one, whole_units

Concatenation = Literal["direct", "doubling"]

Slot = tuple[int, Kind, int, int]
"""(slot, kind, stage, microbatch)."""


def chimera(*, stages: int, microbatches: int, concatenation: Concatenation = "direct") -> Schedule:
    """Half the microbatches go down the devices, half go up; each direction's bubbles hold the other's tasks.

    Device d has stages d and stages - 1 - d, so every stage is on two devices, whose gradients are to be added. With D
    stages, F = B and N = D microbatches, D - 2 slots are idle, against 2 (D - 1) for 1F1B; devices hold between D/2 + 1
    (the outer ones) and D (the inner ones) activations.

    Args:
        stages: an even number.
        microbatches: a multiple of ``stages``; of twice that with doubling.
        concatenation: how more than ``stages`` microbatches follow each other. ``"direct"``: unit after unit, each
            beginning in the bubbles at the end of the one before; ``"doubling"``: each slot has two microbatches, so
            that two forwards take as long as one backward and no bubbles are left in the middle where backwards take
            twice as long; devices hold twice as many activations.

    References:
        Li and Hoefler, Chimera, SC 2021 (2107.06925), sections 3.1 and 3.5. The paper runs both forwards of a doubled
        slot as one of twice the size; here the first is sent on as soon as it is done, so less time is idle.
    """
    at_least_one("schedules.chimera", stages=stages, microbatches=microbatches)
    _valid(stages, microbatches, concatenation)
    each = 2 if concatenation == "doubling" else 1
    orders = [
        [Task(kind, stage, each * number + part) for _, kind, stage, number in slots for part in range(each)]
        for slots in (sorted(_slots(stages, microbatches // each, device)) for device in range(stages))
    ]
    return Schedule(name="chimera", orders=orders, stages=stages, microbatches=microbatches)


def _slots(stages: int, microbatches: int, device: int) -> list[Slot]:
    """When a device's tasks are done, if all take one slot: no two share one.

    The m-th microbatch of a direction's half unit is forward at stage s in slot s + 2m and backward in slot
    2 stages - 1 - s + 2m; every unit of ``stages`` microbatches begins 2 stages slots after the one before.
    """
    found: list[Slot] = []
    for number in range(microbatches):
        unit, place = divmod(number, stages)
        goes_up, m = divmod(place, stages // 2)
        stage = stages - 1 - device if goes_up else device
        begin = 2 * stages * unit + 2 * m
        found.append((begin + stage, "forward", stage, number))
        found.append((begin + 2 * stages - 1 - stage, "backward", stage, number))
    return found


def _valid(stages: int, microbatches: int, concatenation: str) -> None:
    if concatenation not in ("direct", "doubling"):
        raise ShardingError(
            "schedules.chimera(concatenation)", there=repr(concatenation), must="'direct' or 'doubling'"
        )
    if stages % 2:
        raise ShardingError(
            "schedules.chimera(stages)",
            there=f"{stages}, which is odd",
            must="an even number: each device has a stage of either direction",
            fix=f"stages={stages + 1}",
        )
    unit = stages if concatenation == "direct" else 2 * stages
    must = f"a multiple of {unit}, the microbatches of a unit of {stages} stages ({concatenation})"
    whole_units("schedules.chimera", microbatches, unit, must=must)
