"""Devices for a run: virtual ones on a CPU, as many as the mesh needs, or those that the machine has."""

import contextlib
import math
import os

import jax

from sharding import processes
from sharding.errors import ShardingError

from .config import BATCH_AXES

Axes = dict[str, int]


def enough(axes: Axes, *, num_devices: int | None) -> Axes:
    """Start the backend with enough devices for `axes`; the axes with every size known."""
    known = math.prod(size for size in axes.values() if size != -1)
    if processes.CPU_DEVICES not in os.environ:
        _ask_for_cpu_devices(-(-(num_devices or known) // processes.count()))
    there = _count(num_devices)
    if processes.ELASTIC in os.environ:
        axes = shrunk(axes, there)
        known = math.prod(size for size in axes.values() if size != -1)
    if known > there:
        raise ShardingError(
            "--mesh " + written(axes),
            there=f"{there} {jax.default_backend()} devices; the mesh needs {_product(axes)}",
            must="a mesh cannot need more devices than there are",
            fix=_smaller_mesh(there, num_devices),
        )
    found = {axis: there // known if size == -1 else size for axis, size in axes.items()}
    if processes.count() > 1 and math.prod(found.values()) < there:
        raise ShardingError(
            "--mesh " + written(axes),
            there=f"{there} devices of {processes.count()} processes",
            must="every process has a part in the mesh",
            fix=_smaller_mesh(there, num_devices),
        )
    return found


def shrunk(axes: Axes, there: int) -> Axes:
    """The axes for fewer devices than they were written for: those that split the batch are halved first, then what
    splits parameters; the program and its batch stay the same."""
    axes = dict(axes)
    for axis in (*BATCH_AXES, *(axis for axis in reversed(axes) if axis not in BATCH_AXES)):
        while math.prod(size for size in axes.values() if size != -1) > there and axes.get(axis, 1) % 2 == 0:
            axes[axis] //= 2
    return axes


def written(axes: Axes) -> str:
    """The axes as the command line writes them."""
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def _ask_for_cpu_devices(count: int) -> None:
    # A flag in the environment is the same request; JAX refuses to hear it twice. The number cannot change once the
    # backend runs, as in a notebook: then those that are there must do.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def _count(asked: int | None) -> int:
    there = len(jax.devices())
    return min(there, asked) if asked and jax.default_backend() == "cpu" else there


def _product(axes: Axes) -> str:
    sizes = [size for size in axes.values() if size != -1]
    return " * ".join(map(str, sizes)) + f" = {math.prod(sizes)}"


def _smaller_mesh(there: int, asked: int | None) -> list[str]:
    mesh = f"--mesh data={there}"
    return [mesh, "leave --devices out"] if asked else [mesh]
