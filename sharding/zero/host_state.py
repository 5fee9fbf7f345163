"""Optimizer state in the host's memory: moved there and back, and only where devices reach it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShardingError
from ..mesh import current

KIND = "pinned_host"
"""JAX's name for the host's memory that devices read."""


def stored(tree: Any) -> Any:
    """The arrays in the host's memory; scalars stay on the device."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if jnp.ndim(x) else x, tree)


def fetched(tree: Any) -> Any:
    """The arrays on the device."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if jnp.ndim(x) else x, tree)


def check(asked: str) -> None:
    """Raises unless the devices of the mesh in context reach the host's memory."""
    mesh = current()
    if not isinstance(mesh, jax.sharding.Mesh):
        return
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if KIND not in kinds:
        raise ShardingError(
            asked,
            found=f"memory kinds {', '.join(kinds) or 'none'} of {device.platform} devices ({device.device_kind})",
            required=f"the memory kind {KIND}",
            fix="offload=None",
        )
