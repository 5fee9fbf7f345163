"""Schedules as integer tables for a lockstep program: the task of each device in each tick, and buffer slots.

After every tick, results are exchanged by collective permutes: all devices send their latest results a fixed number of
devices on, and each stores those that it needs. Pending values are stored in slots, one buffer of slots per kind of
value; an extra last slot receives values that are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ..schedule import Schedule
from ..task_table import Task

Buffer = Literal["input", "gradient", "residual", "saved", "context", "context gradient"]
"""A stage's input; the gradient of its output; residuals from the forward for the backward; values saved by
backward-input for backward-weight; a slice's context for the next slice; and the gradient of that context."""
BUFFERS: tuple[Buffer, ...] = get_args(Buffer)

OPS = (None, "forward", "backward", "backward-input", "backward-weight")
"""Tasks of a device in a tick, by number."""


class Exchange(NamedTuple):
    """A collective permute after every tick, by `shift` devices."""

    buffer: Buffer
    shift: int


class BufferEntry(NamedTuple):
    """A value in a slot of a device."""

    device: int
    stage: int
    unit: int
    """A microbatch or slice."""


class Send(NamedTuple):
    """The transfer of a task's result."""

    tick: int
    exchange: Exchange
    to: BufferEntry


@dataclass(frozen=True, kw_only=True)
class TickTables:
    """Tables are int32 [ticks, devices]; `arrivals` is [ticks, devices, exchanges]."""

    op: np.ndarray
    chunk: np.ndarray
    """Index into the device's stages."""
    unit: np.ndarray
    """Index of the microbatch or slice."""
    is_first: np.ndarray
    is_last: np.ndarray
    is_first_slice: np.ndarray
    is_last_slice: np.ndarray
    slot: Mapping[Buffer, np.ndarray]
    """Slots of a task's operands and results."""
    neighbour_slot: Mapping[Buffer, np.ndarray]
    """Slots for the next slice, or in a backward for the previous one."""
    num_slots: Mapping[Buffer, int]
    exchanges: tuple[Exchange, ...]
    arrivals: np.ndarray
    """The slot that receives each exchange."""
    stages: tuple[tuple[int, ...], ...]
    """Per device; see ``device_stages``."""

    @property
    def ops(self) -> tuple[int, ...]:
        """Operations that occur."""
        return tuple(int(op) for op in np.unique(self.op))

    def max_runs(self, *kinds: str, at: np.ndarray | None = None) -> tuple[int, int]:
        """(ticks with a task of these kinds, where `at` is 1, on the busiest device; all ticks)."""
        runs = np.isin(self.op, [op for op, kind in enumerate(OPS) if kind in kinds])
        runs = runs if at is None else runs & (at != 0)
        return int(runs.sum(axis=0).max()), len(runs)


def tick_tables(schedule: Schedule) -> TickTables:
    """The tables of a valid schedule.

    Raises:
        ShardingError: see ``Schedule.check``.
    """
    rows = schedule.ticks()
    last, last_slice = schedule.stages - 1, schedule.slices - 1
    tick = {task: t for t, row in enumerate(rows) for task in row if task is not None}
    lifetimes, sends = _lifetimes(schedule, tick)
    slots: dict[Buffer, dict[BufferEntry, int]] = {buffer: _slots(lifetimes[buffer]) for buffer in BUFFERS}
    num_slots: dict[Buffer, int] = {buffer: max(slots[buffer].values(), default=-1) + 1 for buffer in BUFFERS}
    stages = device_stages(schedule)
    exchanges = tuple(sorted({send.exchange for send in sends}))
    arrivals = np.empty((len(rows), schedule.devices, len(exchanges)), np.int32)
    for k, exchange in enumerate(exchanges):
        arrivals[:, :, k] = num_slots[exchange.buffer]
    for send in sends:
        arrivals[send.tick, send.to.device, exchanges.index(send.exchange)] = slots[send.exchange.buffer][send.to]

    def table(of: Callable[[int, Task], int], idle: int = 0) -> np.ndarray:
        cells = [[idle if task is None else of(device, task) for device, task in enumerate(row)] for row in rows]
        return np.array(cells, np.int32)

    def slot(buffer: Buffer, ahead: int = 0) -> np.ndarray:
        found, none = slots[buffer], num_slots[buffer]
        return table(
            lambda device, task: found.get(BufferEntry(device, task.stage, schedule.unit(task) + ahead), none), none
        )

    return TickTables(
        op=table(lambda _, task: OPS.index(task.kind)),
        chunk=table(lambda device, task: stages[device].index(task.stage)),
        unit=table(lambda _, task: schedule.unit(task)),
        is_first=table(lambda _, task: task.stage == 0),
        is_last=table(lambda _, task: task.stage == last),
        is_first_slice=table(lambda _, task: task.slice == 0),
        is_last_slice=table(lambda _, task: task.slice == last_slice),
        slot={buffer: slot(buffer) for buffer in BUFFERS},
        neighbour_slot={"context": slot("context", 1), "context gradient": slot("context gradient", -1)},
        num_slots=num_slots,
        exchanges=exchanges,
        arrivals=arrivals,
        stages=stages,
    )


def device_stages(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Per device its stages, padded to equal counts by repeating the first stage."""
    most = max(map(len, schedule.placement))
    return tuple((*own, *own[:1] * (most - len(own))) for own in schedule.placement)


def _lifetimes(
    schedule: Schedule, tick: Mapping[Task, int]
) -> tuple[dict[Buffer, dict[BufferEntry, tuple[int, int]]], list[Send]]:
    """The lifetime of each value, from the end of its tick of creation to that of its last use, and all transfers."""
    last = schedule.stages - 1
    device = {(t.stage, schedule.unit(t)): d for d, order in enumerate(schedule.orders) for t in order}
    begins = {(t.stage, schedule.unit(t)): at for t, at in tick.items() if t.kind == "forward"}
    inputs = {(t.stage, schedule.unit(t)): at for t, at in tick.items() if t.sends_gradient}
    weights = {(t.stage, schedule.unit(t)): at for t, at in tick.items() if t.kind == "backward-weight"}
    lifetimes: dict[Buffer, dict[BufferEntry, tuple[int, int]]] = {buffer: {} for buffer in BUFFERS}
    sends: list[Send] = []

    def send(at: int, buffer: Buffer, source: int, stage: int, unit: int, until: int) -> None:
        to = BufferEntry(device[stage, unit], stage, unit)
        lifetimes[buffer][to] = (at, until)
        sends.append(Send(at, Exchange(buffer, (to.device - source) % schedule.devices), to))

    for (stage, unit), begin in begins.items():
        own, end = BufferEntry(device[stage, unit], stage, unit), inputs[stage, unit]
        lifetimes["residual"][own] = (begin, end)
        if (stage, unit) in weights:
            lifetimes["saved"][own] = (end, weights[stage, unit])
        if stage < last:
            send(begin, "input", own.device, stage + 1, unit, begins[stage + 1, unit])
        else:
            lifetimes["gradient"][own] = (begin, end)
        if stage > 0:
            send(end, "gradient", own.device, stage - 1, unit, inputs[stage - 1, unit])
        if unit % schedule.slices:  # not the first slice
            before = own._replace(unit=unit - 1)
            lifetimes["context"][own] = (begins[stage, before.unit], begin)
            lifetimes["context gradient"][before] = (end, inputs[stage, before.unit])
    return lifetimes, sends


def _slots(lifetimes: Mapping[BufferEntry, tuple[int, int]]) -> dict[BufferEntry, int]:
    """Assigns slots such that values with overlapping lifetimes on a device get different ones.

    A slot that is read in a tick can be written in the same tick: reads come first, arrivals last.
    """
    found: dict[BufferEntry, int] = {}
    for device in {entry.device for entry in lifetimes}:
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        for entry, (begin, end) in sorted(_on_device(device, lifetimes), key=lambda item: item[1]):
            free += [slot for until, slot in busy if until <= begin]
            busy = [(until, slot) for until, slot in busy if until > begin]
            slot = min(free, default=len(busy))
            free = [one for one in free if one != slot]
            busy.append((end, slot))
            found[entry] = slot
    return found


def _on_device(device: int, lifetimes: Mapping[BufferEntry, Any]) -> Iterable[tuple[BufferEntry, Any]]:
    return ((entry, span) for entry, span in lifetimes.items() if entry.device == device)
