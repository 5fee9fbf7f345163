"""A schedule as tables of numbers, which one program reads: what each device does in each tick, and where things lie.

After every tick results go on along lanes: all devices send what they have made so many devices on, at once, and each
keeps what is meant for it. What waits lies in slots, a buffer of them per kind of thing; a slot behind the last one is
for what nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ..schedule import Schedule
from ..table import Task

Thing = Literal["input", "gradient", "residual", "saved", "context", "context gradient"]
"""A stage's input, the gradient of its output, what its forward leaves for its backward, and backward-input for
backward-weight; what a slice of a sequence leaves for the next one, and the gradient of that."""
THINGS: tuple[Thing, ...] = get_args(Thing)

OPS = (None, "forward", "backward", "backward-input", "backward-weight")
"""What a device does in a tick, by number."""


class Lane(NamedTuple):
    """An exchange after every tick: what each device has for it goes so many devices on."""

    thing: Thing
    shift: int


class Held(NamedTuple):
    """Something that lies in a slot of a device."""

    device: int
    stage: int
    unit: int
    """A microbatch, or a slice of it."""


class Send(NamedTuple):
    """A task's result, on its way."""

    tick: int
    lane: Lane
    to: Held


@dataclass(frozen=True, kw_only=True)
class Lockstep:
    """Tables are int32 [ticks, devices], and [ticks, devices, lanes] for arrivals."""

    op: np.ndarray
    chunk: np.ndarray
    """Which of the device's stages."""
    unit: np.ndarray
    """Which microbatch, or slice of one."""
    is_first: np.ndarray
    is_last: np.ndarray
    is_first_slice: np.ndarray
    is_last_slice: np.ndarray
    slot: Mapping[Thing, np.ndarray]
    """Where a task finds what it needs and leaves what it makes."""
    passed: Mapping[Thing, np.ndarray]
    """Where it leaves what the next slice needs, or a backward the slice before."""
    num_slots: Mapping[Thing, int]
    lanes: tuple[Lane, ...]
    arrivals: np.ndarray
    """The slot that takes what arrives."""
    stages: tuple[tuple[int, ...], ...]
    """Per device; see ``device_stages``."""

    @property
    def ops(self) -> tuple[int, ...]:
        """Those that occur."""
        return tuple(int(op) for op in np.unique(self.op))

    def most(self, *kinds: str, at: np.ndarray | None = None) -> tuple[int, int]:
        """In how many ticks the device that most often does so has a task of these kinds, `at` 1, and of how many."""
        does = np.isin(self.op, [op for op, kind in enumerate(OPS) if kind in kinds])
        does = does if at is None else does & (at != 0)
        return int(does.sum(axis=0).max()), len(does)


def lockstep(schedule: Schedule) -> Lockstep:
    """The tables of a valid schedule.

    Raises:
        ShardingError: see ``Schedule.check``.
    """
    rows = schedule.ticks()
    last, last_slice = schedule.stages - 1, schedule.slices - 1
    tick = {task: t for t, row in enumerate(rows) for task in row if task is not None}
    spans, sends = _spans(schedule, tick)
    slots: dict[Thing, dict[Held, int]] = {thing: _slots(spans[thing]) for thing in THINGS}
    num_slots: dict[Thing, int] = {thing: max(slots[thing].values(), default=-1) + 1 for thing in THINGS}
    stages = device_stages(schedule)
    lanes = tuple(sorted({send.lane for send in sends}))
    arrivals = np.empty((len(rows), schedule.devices, len(lanes)), np.int32)
    for k, lane in enumerate(lanes):
        arrivals[:, :, k] = num_slots[lane.thing]
    for send in sends:
        arrivals[send.tick, send.to.device, lanes.index(send.lane)] = slots[send.lane.thing][send.to]

    def table(of: Callable[[int, Task], int], idle: int = 0) -> np.ndarray:
        cells = [[idle if task is None else of(device, task) for device, task in enumerate(row)] for row in rows]
        return np.array(cells, np.int32)

    def slot(thing: Thing, ahead: int = 0) -> np.ndarray:
        found, none = slots[thing], num_slots[thing]
        return table(lambda device, task: found.get(Held(device, task.stage, schedule.unit(task) + ahead), none), none)

    return Lockstep(
        op=table(lambda _, task: OPS.index(task.kind)),
        chunk=table(lambda device, task: stages[device].index(task.stage)),
        unit=table(lambda _, task: schedule.unit(task)),
        is_first=table(lambda _, task: task.stage == 0),
        is_last=table(lambda _, task: task.stage == last),
        is_first_slice=table(lambda _, task: task.slice == 0),
        is_last_slice=table(lambda _, task: task.slice == last_slice),
        slot={thing: slot(thing) for thing in THINGS},
        passed={"context": slot("context", 1), "context gradient": slot("context gradient", -1)},
        num_slots=num_slots,
        lanes=lanes,
        arrivals=arrivals,
        stages=stages,
    )


def device_stages(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Per device its stages, as many for each: one that has fewer than another has its first one more than once."""
    most = max(map(len, schedule.placement))
    return tuple((*own, *own[:1] * (most - len(own))) for own in schedule.placement)


def _spans(schedule: Schedule, tick: Mapping[Task, int]) -> tuple[dict[Thing, dict[Held, tuple[int, int]]], list[Send]]:
    """What lies on a device from the end of which tick to that of which other, and what is sent."""
    last = schedule.stages - 1
    device = {(t.stage, schedule.unit(t)): d for d, order in enumerate(schedule.orders) for t in order}
    begins = {(t.stage, schedule.unit(t)): at for t, at in tick.items() if t.kind == "forward"}
    inputs = {(t.stage, schedule.unit(t)): at for t, at in tick.items() if t.sends_gradient}
    weights = {(t.stage, schedule.unit(t)): at for t, at in tick.items() if t.kind == "backward-weight"}
    spans: dict[Thing, dict[Held, tuple[int, int]]] = {thing: {} for thing in THINGS}
    sends: list[Send] = []

    def send(at: int, thing: Thing, source: int, stage: int, unit: int, until: int) -> None:
        to = Held(device[stage, unit], stage, unit)
        spans[thing][to] = (at, until)
        sends.append(Send(at, Lane(thing, (to.device - source) % schedule.devices), to))

    for (stage, unit), begin in begins.items():
        own, end = Held(device[stage, unit], stage, unit), inputs[stage, unit]
        spans["residual"][own] = (begin, end)
        if (stage, unit) in weights:
            spans["saved"][own] = (end, weights[stage, unit])
        if stage < last:
            send(begin, "input", own.device, stage + 1, unit, begins[stage + 1, unit])
        else:
            spans["gradient"][own] = (begin, end)
        if stage > 0:
            send(end, "gradient", own.device, stage - 1, unit, inputs[stage - 1, unit])
        if unit % schedule.slices:  # not the first slice
            before = own._replace(unit=unit - 1)
            spans["context"][own] = (begins[stage, before.unit], begin)
            spans["context gradient"][before] = (end, inputs[stage, before.unit])
    return spans, sends


def _slots(spans: Mapping[Held, tuple[int, int]]) -> dict[Held, int]:
    """A slot for each, such that those that lie on a device at the same time have different ones.

    A slot that is read in a tick can be written in the same one: reading comes first, arrivals last.
    """
    found: dict[Held, int] = {}
    for device in {held.device for held in spans}:
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        for held, (begin, end) in sorted(_of(device, spans), key=lambda item: item[1]):
            free += [slot for until, slot in busy if until <= begin]
            busy = [(until, slot) for until, slot in busy if until > begin]
            slot = min(free, default=len(busy))
            free = [one for one in free if one != slot]
            busy.append((end, slot))
            found[held] = slot
    return found


def _of(device: int, spans: Mapping[Held, Any]) -> Iterable[tuple[Held, Any]]:
    return ((held, span) for held, span in spans.items() if held.device == device)
