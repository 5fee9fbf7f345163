"""Ahead-of-time compilation for hardware you don't have: compile-only devices of a described slice or cluster.

XLA:TPU comes with libtpu and knows TPU topologies by name. XLA:GPU comes with `jax[cuda13]` and reads the GPU's target
config (`targets/`, a `GpuTargetConfigProto` of openxla/xla); it does not reject a program that exceeds the GPU's
memory. Neither needs a chip.
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
"""Platform -> its compiler's module and the extra that installs it."""
_ENVIRONMENT = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
"""Environment defaults for compile-only use: other processes may load libtpu too, don't query a TPU host's metadata
server, and don't require a CUDA driver. Variables that are already set keep their value."""


def compile_only(devices: Devices | str) -> list[Any]:
    """Compile-only devices of a description, for `sharding.mesh(..., devices=...)`.

    Programs lowered over them compile with the real compiler but can't run.

    Args:
        devices: `"v5p:8x8x8"`, the torus of chips of a TPU slice, or `"h100:64x8"`, hosts x GPUs per host.

    Raises:
        ShardingError: if the compiler isn't installed, or doesn't support devices of that kind or number.

    Example:
        with sharding.mesh(data=-1, tensor=8, devices=cost.compile_only("v5p:8x8x8")):
            print(step.complete(state, batch).verify(step.lower(state, batch).compile()))
    """
    described = hardware.parse(devices) if isinstance(devices, str) else devices
    _check_compiler(described)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    found = _tpus(described) if described.chip.platform == "tpu" else _gpus(described)
    if len(found) != described.num_devices:
        raise ShardingError(
            _subject(described),
            found=f"{len(found)} devices in the compiler's topology",
            required=f"{described.num_devices} devices, as described",
        )
    return found


def _subject(described: Devices) -> str:
    return f"ahead-of-time compilation for {described}"


def _check_compiler(described: Devices) -> None:
    platform = described.chip.platform
    if platform not in _COMPILERS:
        raise ShardingError(
            _subject(described),
            found=f"devices of the platform {platform!r}",
            required="TPUs or GPUs; virtual CPU devices need no description",
            fix='jax.config.update("jax_num_cpu_devices", 8)',
        )
    module, extra = _COMPILERS[platform]
    if importlib.util.find_spec(module) is None:
        raise ShardingError(
            _subject(described),
            found=f"{module} is not installed",
            required=f"the XLA:{platform.upper()} compiler; no chip is needed",
            fix=f"pip install 'sharding-jax[{extra}]'",
        )


def _tpus(described: Devices) -> list[Any]:
    is_megacore = described.chip.name == "v4"  # a chip's two cores act as one device
    options = {"chip_config_name": "megacore"} if is_megacore else {}
    return _topology_devices(described, "tpu", str(described), options)


def _gpus(described: Devices) -> list[Any]:
    targets = importlib.resources.files("sharding.xla") / "targets"
    known = sorted(one.name.removesuffix(".txt") for one in targets.iterdir())
    if described.chip.name not in known:
        raise ShardingError(
            _subject(described),
            found=f"no target config for {described.chip.name}",
            required=f"a GPU with a target config: {', '.join(known)}",
            fix=[f'"{name}:{"x".join(map(str, described.shape))}"' for name in known],
        )
    hosts, per_host = described.shape
    options = {
        "target_config": (targets / f"{described.chip.name}.txt").read_text(),
        "topology": f"1x{hosts}x{per_host}",  # partitions x hosts x GPUs of a host
    }
    return _topology_devices(described, "cuda", "", options)


def _topology_devices(described: Devices, platform: str, name: str, options: dict[str, str]) -> list[Any]:
    try:
        return list(topologies.get_topology_desc(platform=platform, topology_name=name, **options).devices)
    except Exception as error:  # the plugins' own, of several types
        raise ShardingError(
            _subject(described),
            found=(str(error).splitlines() or [type(error).__name__])[0],
            required="a topology that the compiler supports, and its plugin discovered when JAX initialised",
            fix="JAX_PLATFORMS=cpu in the environment, if JAX was already in use" if platform == "cuda" else (),
        ) from error
