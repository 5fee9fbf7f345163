"""Described devices: ``"v5p:4x8x8"``, ``"h100:16x8"``.

No hardware is needed. For TPUs the shape is the torus of chips; for GPUs and CPUs it is hosts x devices per host.
Devices are JAX devices: ``jax.devices()`` would list ``chips x devices_per_chip`` of them.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

from ..errors import ShardingError
from .chip import Chip
from .known_chips import CHIPS_PER_TPU_HOST, GPUS_PER_HOST, chip
from .machine_file import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Devices that are described rather than attached."""

    chip: Chip
    shape: tuple[int, ...]
    """TPU: chips along each dim of the torus. Otherwise: (hosts, devices per host)."""

    @property
    def num_devices(self) -> int:
        """How many devices JAX would list."""
        return math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def num_hosts(self) -> int | None:
        """Hosts; None for a TPU slice, whose links do not end at a host."""
        return None if self.chip.torus_dims else self.shape[0]

    @property
    def devices_per_host(self) -> int:
        """Devices of one host, all of one process; of a TPU slice smaller than a host all."""
        if not self.chip.torus_dims:
            return self.shape[1]
        return min(self.num_devices, CHIPS_PER_TPU_HOST * self.chip.devices_per_chip)

    @property
    def devices_per_island(self) -> int:
        """Consecutive devices joined by the chip's own link: a TPU slice, or the GPUs of a host."""
        return self.num_devices if self.chip.torus_dims else self.shape[1]

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each torus dim has wraparound links; empty without a torus."""
        closed = [self.chip.wraps_at > 0 and size % self.chip.wraps_at == 0 for size in self.shape]
        if not self.chip.torus_dims:
            return ()
        return (all(closed),) * len(closed) if self.chip.wraps_together else tuple(closed)

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse(text: str) -> Devices:
    """Parse a description of devices.

    Args:
        text: ``"v5p:4x8x8"``, the torus of chips of a TPU slice; ``"h100:16x8"``, hosts x GPUs per host, where a
            single number means one host.

    Raises:
        ShardingError: if the chip is unknown or the shape has the wrong form for it.
    """
    name, _, shape_text = text.strip().lower().partition(":")
    known = chip(name, asked=f"the devices {text!r}", shape_text=shape_text)
    shape = _shape(text, shape_text, known)
    if not known.torus_dims and len(shape) == 1:
        shape = (1, *shape)
    if len(shape) != (known.torus_dims or 2):
        raise _malformed(text, known, f"{known.name}:{'x'.join(map(str, _refold(shape, known.torus_dims or 2)))}")
    return Devices(chip=known, shape=shape)


def _shape(text: str, shape_text: str, known: Chip) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", shape_text):
        raise _malformed(text, known, _EXAMPLES[known.torus_dims].format(known.name))
    return tuple(int(part) for part in shape_text.split("x"))


def arranged(hardware: Devices | Chip | str, num_devices: int) -> Devices:
    """This many devices of a kind, in their usual shape.

    Args:
        hardware: devices, returned unchanged; or a chip, a chip's name or the path of a calibration file (``*.json``),
            arranged in hosts of 8 (GPUs), on one host (CPUs) or in the most cubic torus (TPUs).
        num_devices: JAX devices.

    Raises:
        ShardingError: if the description has another number of devices, or the chip doesn't come in this number.
    """
    if isinstance(hardware, str):
        hardware = _load_or_parse(hardware)
    if isinstance(hardware, Chip):
        return Devices(chip=hardware, shape=_usual_shape(hardware, num_devices))
    if hardware.num_devices != num_devices:
        raise ShardingError(
            f"{num_devices} devices of {hardware}",
            found=f"{hardware} is {hardware.num_devices} devices",
            required=f"a description of {num_devices} devices",
            fix=f'"{hardware.chip.name}"',
        )
    return hardware


def _load_or_parse(text: str) -> Devices | Chip:
    if text.endswith(".json"):
        return load(text)
    return parse(text) if ":" in text else chip(text)


def _usual_shape(known: Chip, num_devices: int) -> tuple[int, ...]:
    if known.torus_dims:
        return _usual_torus(known, num_devices)
    per_host = num_devices if known.platform == "cpu" else min(GPUS_PER_HOST, num_devices)
    if num_devices % per_host:
        raise ShardingError(
            f"{num_devices} devices of {known.name}",
            found=f"{num_devices} / {per_host} = {num_devices / per_host:g} hosts",
            required=f"a multiple of {per_host} devices, {per_host} per host",
            fix=f'"{known.name}:<hosts>x<devices per host>"',
        )
    return num_devices // per_host, per_host


def _usual_torus(known: Chip, num_devices: int) -> tuple[int, ...]:
    """The most cubic torus, smallest dim first."""
    num_chips, left = divmod(num_devices, known.devices_per_chip)
    if left:
        raise ShardingError(
            f"{num_devices} devices of {known.name}",
            found=f"{known.devices_per_chip} devices per chip",
            required=f"a multiple of {known.devices_per_chip} devices",
        )
    divisors = [size for size in range(1, num_chips + 1) if num_chips % size == 0]
    heads = itertools.combinations_with_replacement(divisors, known.torus_dims - 1)
    shapes = [(*head, num_chips // math.prod(head)) for head in heads if num_chips % math.prod(head) == 0]
    return min((tuple(sorted(shape)) for shape in shapes), key=lambda shape: (sum(shape), shape))


_EXAMPLES = {0: "{}:2x8", 2: "{}:16x16", 3: "{}:4x4x8"}
_FORMS = {0: "hosts x devices per host", 2: "a 2D torus of chips", 3: "a 3D torus of chips"}


def _malformed(text: str, known: Chip, nearest: str) -> ShardingError:
    return ShardingError(
        f"the devices {text!r}",
        found=f"not a shape of {known.name} devices",
        required=f"{known.name}:<shape>, the shape being {_FORMS[known.torus_dims]}",
        fix=f'"{nearest}"',
    )


def _refold(shape: tuple[int, ...], num_dims: int) -> tuple[int, ...]:
    """The same number of chips in another number of dims."""
    if len(shape) < num_dims:
        return shape + (1,) * (num_dims - len(shape))
    kept = shape[: num_dims - 1]
    return (*kept, math.prod(shape[num_dims - 1 :]))
