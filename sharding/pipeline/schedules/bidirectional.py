"""Chimera: two pipelines in opposite directions over the same devices."""

from __future__ import annotations

from typing import Literal

from ...errors import ShardingError
from ..schedule import Schedule
from ..task_table import Kind, Task, check_multiple, check_positive

Concatenation = Literal["direct", "doubling"]

Slot = tuple[int, Kind, int, int]
"""(slot, kind, stage, microbatch)."""


def chimera(*, stages: int, microbatches: int, concatenation: Concatenation = "direct") -> Schedule:
    """Chimera: half the microbatches run down the devices, half up, each filling the other's bubbles.

    Device d runs stages d and stages - 1 - d, so every stage is on two devices, whose gradients are summed. With D
    stages, F = B and N = D microbatches, D - 2 slots are idle, against 2 (D - 1) for 1F1B; devices stash between
    D/2 + 1 (the outer ones) and D (the inner ones) activations.

    Args:
        stages: an even number.
        microbatches: a multiple of ``stages``, or of twice that with doubling.
        concatenation: how to run more than ``stages`` microbatches. ``"direct"``: unit after unit, each starting in the
            bubbles at the end of the previous one. ``"doubling"``: two microbatches per slot, so that two forwards take
            as long as one backward, which removes the intermediate bubbles where backwards take twice as long; devices
            stash twice as many activations.

    References:
        Li and Hoefler, Chimera, SC 2021 (2107.06925), sections 3.1 and 3.5. The paper runs both forwards of a doubled
        slot as one of twice the size; here the first is sent as soon as it is done, which leaves smaller bubbles.
    """
    check_positive("schedules.chimera", stages=stages, microbatches=microbatches)
    _valid(stages, microbatches, concatenation)
    each = 2 if concatenation == "doubling" else 1
    orders = [
        [Task(kind, stage, each * number + part) for _, kind, stage, number in slots for part in range(each)]
        for slots in (sorted(_slots(stages, microbatches // each, device)) for device in range(stages))
    ]
    return Schedule(name="chimera", orders=orders, stages=stages, microbatches=microbatches)


def _slots(stages: int, microbatches: int, device: int) -> list[Slot]:
    """A device's tasks with their slots, in unit time: no two tasks share one.

    The m-th microbatch of a direction's half unit runs forward at stage s in slot s + 2m and backward in slot
    2 stages - 1 - s + 2m; every unit of ``stages`` microbatches starts 2 stages slots after the previous one.
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
            "schedules.chimera(concatenation)", found=repr(concatenation), required="'direct' or 'doubling'"
        )
    if stages % 2:
        raise ShardingError(
            "schedules.chimera(stages)",
            found=f"{stages}, which is odd",
            required="an even number: each device runs one stage per direction",
            fix=f"stages={stages + 1}",
        )
    unit = stages if concatenation == "direct" else 2 * stages
    must = f"a multiple of {unit}, one unit of {stages} stages ({concatenation})"
    check_multiple("schedules.chimera", microbatches, unit, required=must)
