"""Devices that aren't there, as the compiler of their kind knows them: programs compile for them, none runs.

XLA:TPU comes with libtpu and knows its chips and their tori by name. XLA:GPU comes with `jax[cuda13]` and is told of a
GPU by a text (`targets/`, a `GpuTargetConfigProto` of openxla/xla); it doesn't refuse a program that needs more memory
than the GPU has. Neither needs a chip.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
from typing import Any

from jax.experimental import topologies

from .. import hardware
from ..errors import ShardingError
from ..hardware import Devices

_COMPILERS = {"tpu": ("libtpu", "tpu"), "gpu": ("jax_cuda13_plugin", "cuda13")}
"""Platform -> the module of its compiler and the extra that installs it."""
_SETTINGS = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
"""What compilers read from the environment: that no chip is taken, so that other processes may load libtpu too; that
this need not be a TPU host; that no driver is there. Set where the environment doesn't say otherwise."""


def compile_only(devices: Devices | str) -> list[Any]:
    """The devices of a description, for `sharding.mesh(..., devices=...)`: what is lowered over them compiles for real.

    Args:
        devices: `"v5p:8x8x8"`, the torus of chips of a TPU slice, or `"h100:64x8"`, hosts x GPUs per host.

    Raises:
        ShardingError: the compiler isn't installed, or doesn't know devices of that kind or number.

    Example:
        with sharding.mesh(data=-1, tensor=8, devices=cost.compile_only("v5p:8x8x8")):
            print(step.complete(state, batch).verify(step.lower(state, batch).compile()))
    """
    wanted = hardware.parse(devices) if isinstance(devices, str) else devices
    _check_compiler(wanted)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    found = _tpus(wanted) if wanted.chip.platform == "tpu" else _gpus(wanted)
    if len(found) != wanted.num_devices:
        raise ShardingError(
            _asked(wanted),
            there=f"{len(found)} devices by the compiler, {wanted.num_devices} by the description",
            must="both count the same devices",
        )
    return found


def _asked(wanted: Devices) -> str:
    return f"compiling for {wanted}, which isn't there"


def _check_compiler(wanted: Devices) -> None:
    platform = wanted.chip.platform
    if platform not in _COMPILERS:
        raise ShardingError(
            _asked(wanted),
            there=f"devices of the platform {platform!r}",
            must="the devices are TPUs or GPUs; a CPU's virtual devices can be had for real",
            fix='jax.config.update("jax_num_cpu_devices", 8)',
        )
    module, extra = _COMPILERS[platform]
    if importlib.util.find_spec(module) is None:
        raise ShardingError(
            _asked(wanted),
            there=f"no {module}, which has the compiler",
            must=f"XLA:{platform.upper()} is installed; no chip is needed",
            fix=f"pip install 'sharding-jax[{extra}]'",
        )


def _tpus(wanted: Devices) -> list[Any]:
    one_core = {"chip_config_name": "megacore"} if wanted.chip.name == "v4" else {}  # a chip's two cores as one device
    return _described(wanted, "tpu", str(wanted), one_core)


def _gpus(wanted: Devices) -> list[Any]:
    targets = importlib.resources.files("sharding.cost") / "targets"
    known = sorted(one.name.removesuffix(".txt") for one in targets.iterdir())
    if wanted.chip.name not in known:
        raise ShardingError(
            _asked(wanted),
            there=f"no target text for {wanted.chip.name}",
            must=f"the compiler is told of the GPU: {', '.join(known)}",
            fix=[f'"{name}:{"x".join(map(str, wanted.shape))}"' for name in known],
        )
    hosts, per_host = wanted.shape
    options = {
        "target_config": (targets / f"{wanted.chip.name}.txt").read_text(),
        "topology": f"1x{hosts}x{per_host}",  # partitions x hosts x GPUs of a host
    }
    return _described(wanted, "cuda", "", options)


def _described(wanted: Devices, platform: str, name: str, options: dict[str, str]) -> list[Any]:
    try:
        return list(topologies.get_topology_desc(platform=platform, topology_name=name, **options).devices)
    except Exception as error:  # the plugins' own, of several types
        raise ShardingError(
            _asked(wanted),
            there=(str(error).splitlines() or [type(error).__name__])[0],
            must="the compiler knows such devices, and was found when JAX began",
            fix="JAX_PLATFORMS=cpu in the environment, if JAX was in use before" if platform == "cuda" else (),
        ) from error
