"""The devices of a run: those attached, or as many virtual CPU devices as the mesh needs."""

import contextlib
import math
import os

import jax

from sharding.distributed import processes
from sharding.errors import ShardingError

from .elastic_mesh import Axes, fewer_devices


def set_up_devices(axes: Axes, *, num_devices: int | None) -> Axes:
    """Start the backend with enough devices for `axes`; returns the axes with all sizes known."""
    known = math.prod(size for size in axes.values() if size != -1)
    if processes.CPU_DEVICES not in os.environ:
        _request_cpu_devices(-(-(num_devices or known) // processes.count()))
    available = _count(num_devices)
    processes.barrier("devices")  # an error in one process must not interrupt the start of another's backend
    if processes.ELASTIC in os.environ:
        axes = fewer_devices(axes, available)
        known = math.prod(size for size in axes.values() if size != -1)
    if known > available:
        raise ShardingError(
            "--mesh " + format_axes(axes),
            found=f"{available} {jax.default_backend()} devices; the mesh needs {_product(axes)}",
            required=f"a mesh of at most {available} devices",
            fix=_smaller_mesh(available, num_devices),
        )
    found = {axis: available // known if size == -1 else size for axis, size in axes.items()}
    if processes.count() > 1 and math.prod(found.values()) < available:
        raise ShardingError(
            "--mesh " + format_axes(axes),
            found=f"{available} devices of {processes.count()} processes; the mesh needs {_product(found)}",
            required="a mesh over the devices of all processes",
            fix=_smaller_mesh(available, num_devices),
        )
    return found


def format_axes(axes: Axes) -> str:
    """The axes in the syntax of `--mesh`."""
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def _request_cpu_devices(count: int) -> None:
    # The XLA flag requests the same, and JAX rejects both at once. The number is fixed once the backend runs, as in a
    # notebook: then the existing devices must do.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def _count(num_devices: int | None) -> int:
    available = len(jax.devices())
    return min(available, num_devices) if num_devices and jax.default_backend() == "cpu" else available


def _product(axes: Axes) -> str:
    sizes = [size for size in axes.values() if size != -1]
    return " * ".join(map(str, sizes)) + f" = {math.prod(sizes)}"


def _smaller_mesh(available: int, num_devices: int | None) -> list[str]:
    mesh = f"--mesh data={available}"
    return [mesh, "leave --devices out"] if num_devices else [mesh]
