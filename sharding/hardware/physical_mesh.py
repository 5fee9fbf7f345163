"""The order of real devices in a mesh: along the links of their torus, slices of a TPU outermost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from ..errors import warn


def device_array(devices: Sequence[Any], sizes: Mapping[str, int], *, asked: str) -> np.ndarray:
    """The devices as an array with one dim per axis, in JAX's physical-topology order if possible.

    Devices of several TPU slices are a hybrid mesh: the network between slices is crossed along the major axes alone.
    Where the sizes do not fold onto the torus, or slices, the devices are taken in order and a warning says so.

    Args:
        devices: real or compile-only devices.
        sizes: axis name -> size, major axis first; their product is the number of devices.
        asked: the request, for the warning.
    """
    shape = tuple(sizes.values())
    num_slices = len({_slice(device) for device in devices})
    on_tpu = devices[0].platform == "tpu"
    try:
        if on_tpu and num_slices > 1:
            across = across_slices(shape, num_slices)
            within = tuple(size // count for size, count in zip(shape, across, strict=True))
            return mesh_utils.create_hybrid_device_mesh(within, across, devices)
        axis_types = (AxisType.Auto,) * len(sizes)
        return jax.make_mesh(shape, tuple(sizes), axis_types=axis_types, devices=devices).devices
    except (AssertionError, ValueError, NotImplementedError):  # part of a torus, or one that the sizes don't fit
        if on_tpu:
            warn(
                f"{asked}: the sizes do not fold onto {_torus_text(devices, num_slices)}. Devices are taken in order: "
                "collectives share links, or cross several. Sizes that are products of torus dims fold"
            )
        return np.array(sorted(devices, key=island)).reshape(shape)


def across_slices(shape: Sequence[int], num_slices: int) -> tuple[int, ...]:
    """How often each axis crosses slices: the major axes as often as they can.

    Raises:
        ValueError: no axes have the number of slices as a factor.
    """
    left, found = num_slices, []
    for size in shape:
        found.append(math.gcd(size, left))
        left //= found[-1]
    if left > 1:
        raise ValueError(f"{num_slices} slices do not divide {tuple(shape)}")
    return tuple(found)


def _torus_text(devices: Sequence[Any], num_slices: int) -> str:
    coords = np.array([device.coords for device in devices])
    torus = "x".join(str(n) for n in coords.max(axis=0) - coords.min(axis=0) + 1)
    slices = f"{num_slices} slices of " if num_slices > 1 else ""
    return f"{slices}the torus {torus}, of which there are {len(devices)} devices"


def _slice(device: Any) -> int | None:
    return getattr(device, "slice_index", None)


def island(device: Any) -> int:
    """The island of fast links of a device: its slice if the platform has slices, else its process."""
    index = _slice(device)
    return device.process_index if index is None else index
