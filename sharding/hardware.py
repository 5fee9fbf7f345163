"""Chips, and descriptions of many of them as short texts: ``"v5p:4x8x8"``, ``"h100:16x8"``.

A description needs no device. For TPUs the shape is the torus of chips; for GPUs and CPUs it is hosts x devices per
host. A device is what JAX calls one: ``jax.devices()`` has ``chips x devices_per_chip`` of them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from sharding.errors import ShardingError

Platform = Literal["tpu", "gpu", "cpu"]
Link = Literal["ici", "nvlink", "shared memory", "network", "unknown"]
"""What joins the devices along a mesh axis; ``unknown`` where the devices are only a number."""

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of accelerator chip, in the numbers its maker publishes."""

    name: str
    """The name in a description, lower case."""
    platform: Platform
    """JAX's name for the platform."""
    devices_per_chip: int = 1
    """JAX devices on one chip."""
    memory_bytes: int | None
    """Memory of one device; None where it is the host's own."""
    link: Link
    """What joins the devices of one torus (TPU) or one host (GPU, CPU)."""
    torus_dims: int = 0
    """Dims of the torus that the chips form; 0 where the shape is hosts x devices."""


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            # https://cloud.google.com/tpu/docs/v4: 32 GiB of HBM2; a chip's two cores act as one device (megacore).
            Chip(name="v4", platform="tpu", memory_bytes=32 * _GIB, link="ici", torus_dims=3),
            # https://cloud.google.com/tpu/docs/v5e: 16 GB of HBM2, a 2D torus.
            Chip(name="v5e", platform="tpu", memory_bytes=16 * _GIB, link="ici", torus_dims=2),
            # https://cloud.google.com/tpu/docs/tpu7x compares v5p (95 GiB), v6e (32 GiB) and TPU7x (192 GiB).
            Chip(name="v5p", platform="tpu", memory_bytes=95 * _GIB, link="ici", torus_dims=3),
            Chip(name="v6e", platform="tpu", memory_bytes=32 * _GIB, link="ici", torus_dims=2),
            # TPU7x: two chiplets per chip, each a device of its own with half of the memory.
            Chip(name="tpu7x", platform="tpu", devices_per_chip=2, memory_bytes=96 * _GIB, link="ici", torus_dims=3),
            # NVIDIA A100 80GB SXM data sheet: 80 GB of HBM2e.
            Chip(name="a100", platform="gpu", memory_bytes=80 * 10**9, link="nvlink"),
            # https://www.nvidia.com/en-us/data-center/h100/: H100 SXM, 80 GB of HBM3.
            Chip(name="h100", platform="gpu", memory_bytes=80 * 10**9, link="nvlink"),
            # https://www.nvidia.com/en-us/data-center/h200/: 141 GB of HBM3e.
            Chip(name="h200", platform="gpu", memory_bytes=141 * 10**9, link="nvlink"),
            # NVIDIA DGX B200 data sheet: 8 GPUs with 1,440 GB of HBM3e together.
            Chip(name="b200", platform="gpu", memory_bytes=180 * 10**9, link="nvlink"),
            Chip(name="cpu", platform="cpu", memory_bytes=None, link="shared memory"),
        )
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Devices that are described, not present."""

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
    def devices_per_island(self) -> int:
        """How many consecutive devices the chip's own link joins: a whole TPU slice, or one host of GPUs."""
        return self.num_devices if self.chip.torus_dims else self.shape[1]

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse(text: str) -> Devices:
    """The devices that a text describes.

    Args:
        text: ``"v5p:4x8x8"``, the torus of chips of a TPU slice; ``"h100:16x8"``, hosts x GPUs per host, where one
            number means one host.

    Raises:
        ShardingError: an unknown chip, or a shape that the chip does not come in.
    """
    name, _, shape_text = text.strip().lower().partition(":")
    known = chip(name, asked=f"the devices {text!r}", shape_text=shape_text)
    shape = _shape(text, shape_text, known)
    if not known.torus_dims and len(shape) == 1:
        shape = (1, *shape)
    if len(shape) != (known.torus_dims or 2):
        raise _malformed(text, known, f"{known.name}:{'x'.join(map(str, _refold(shape, known.torus_dims or 2)))}")
    return Devices(chip=known, shape=shape)


def chip(name: str, *, asked: str | None = None, shape_text: str = "") -> Chip:
    """The chip of that name.

    Args:
        name: a key of ``CHIPS``, in either case.
        asked: what the error says was asked, where the name is part of something larger.
        shape_text: the shape that the error adds to the names it offers.
    """
    if (known := CHIPS.get(name.lower())) is not None:
        return known
    nearest = difflib.get_close_matches(name.lower(), CHIPS, n=2, cutoff=0.5)
    suffix = f":{shape_text}" if shape_text else ""
    raise ShardingError(
        asked or f"the chip {name!r}",
        there=f"no chip {name!r}",
        must=f"the chip is one of {', '.join(CHIPS)}",
        fix=[f'"{near}{suffix}"' for near in nearest],
    )


def _shape(text: str, shape_text: str, known: Chip) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", shape_text):
        raise _malformed(text, known, _EXAMPLES[known.torus_dims].format(known.name))
    return tuple(int(part) for part in shape_text.split("x"))


_EXAMPLES = {0: "{}:2x8", 2: "{}:16x16", 3: "{}:4x4x8"}
_FORMS = {0: "hosts x devices per host", 2: "a torus of two dims, in chips", 3: "a torus of three dims, in chips"}


def _malformed(text: str, known: Chip, nearest: str) -> ShardingError:
    return ShardingError(
        f"the devices {text!r}",
        there=f"a shape that {known.name} does not come in",
        must=f"the text is {known.name}:<shape>, where the shape is {_FORMS[known.torus_dims]}",
        fix=f'"{nearest}"',
    )


def _refold(shape: tuple[int, ...], num_dims: int) -> tuple[int, ...]:
    """The same number of chips in another number of dims."""
    if len(shape) < num_dims:
        return shape + (1,) * (num_dims - len(shape))
    kept = shape[: num_dims - 1]
    return (*kept, math.prod(shape[num_dims - 1 :]))
