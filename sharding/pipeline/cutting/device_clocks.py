"""DistIR's simulator: a program for many devices is interpreted with a clock and live memory per device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import ShardingError
from ..task_table import check_positive

ASKED = "cutting.interpret"


class Value(NamedTuple):
    """An array on some devices."""

    name: str
    num_bytes: float
    """On each of the devices."""
    devices: tuple[int, ...]


class DeviceOp(NamedTuple):
    """An op on one device, or a collective or transfer on several."""

    devices: tuple[int, ...]
    seconds: float
    """From when all its devices are ready."""
    reads: tuple[str, ...] = ()
    writes: tuple[Value, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What a program takes."""

    seconds: tuple[float, ...]
    """Of each device's clock at the end."""
    peak_bytes: tuple[float, ...]
    """The most that is live on each device at once."""

    @property
    def latency(self) -> float:
        """The end of the last op."""
        return max(self.seconds)


def interpret(ops: Sequence[DeviceOp], *, devices: int, inputs: Sequence[Value] = ()) -> Execution:
    """The time and memory of a program, whose ops start in the given order.

    An op sets the clocks of its devices to the latest of them, plus its seconds: compute and communication of a device
    don't overlap. A value is live from the op that writes it to the last one that reads it, or to the end if none does.

    Args:
        ops: each reads values of earlier ops or inputs.
        devices: their number.
        inputs: live from the start: weights, a batch.

    Example:
        >>> first = DeviceOp((0,), 2.0, writes=(Value("x", 8, (0,)),))
        >>> send = DeviceOp((0, 1), 0.5, reads=("x",), writes=(Value("y", 8, (1,)),))
        >>> interpret([first, send, DeviceOp((1,), 3.0, reads=("y",))], devices=2)
        Execution(seconds=(2.5, 5.5), peak_bytes=(8.0, 8.0))

    Raises:
        ShardingError: an unknown device, a value that is read before it exists or written twice.

    References:
        Santhanam et al., "DistIR: An Intermediate Representation and Simulator for Efficient Neural Network
        Distribution", 2021 (2111.05426), section 4.
    """
    check_positive(ASKED, devices=devices)
    clocks, live, peak = [0.0] * devices, [0.0] * devices, [0.0] * devices
    last_read = {name: number for number, op in enumerate(ops) for name in op.reads}
    known: dict[str, Value] = {}

    def write(values: Sequence[Value]) -> None:
        for value in values:
            if value.name in known:
                raise ShardingError(f"{ASKED}: value {value.name!r}", found="written twice", required="once")
            _check_devices(value.devices, devices)
            known[value.name] = value
            for device in value.devices:
                live[device] += value.num_bytes
                peak[device] = max(peak[device], live[device])

    write(inputs)
    for number, op in enumerate(ops):
        _check_devices(op.devices, devices)
        if missing := [name for name in op.reads if name not in known]:
            found = "no earlier op writes it"
            raise ShardingError(f"{ASKED}: op {number} reads {missing[0]!r}", found=found, required="an earlier value")
        end = max(clocks[device] for device in op.devices) + op.seconds
        for device in op.devices:
            clocks[device] = end
        write(op.writes)
        for name in dict.fromkeys(op.reads):
            if last_read[name] == number:
                for device in known[name].devices:
                    live[device] -= known[name].num_bytes
    return Execution(seconds=tuple(clocks), peak_bytes=tuple(peak))


def _check_devices(named: tuple[int, ...], devices: int) -> None:
    if not named or not all(0 <= device < devices for device in named):
        raise ShardingError(f"{ASKED}: devices {named}", required=f"at least one, all below {devices}")
