"""From the arrays of one process to arrays over the whole mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import logical
from .errors import ShardingError
from .mesh import current
from .spec import indivisible, to_partition_spec


def put(local: Any, spec: P = P()) -> Any:  # noqa: B008 an immutable value
    """The global arrays that this process's share makes together with every other process's.

    Args:
        local: a pytree of numpy or JAX arrays; with one process the whole, with several this one's part. Arrays that
            lie on devices of several processes already, as what JAX makes under such a mesh, are moved.
        spec: how the global arrays are split; the first dim of a batch over `data`, usually.

    Raises:
        ShardingError: no mesh of real devices, a bad spec, or a dim that its axes don't divide.
    """
    mesh = current()
    if not isinstance(mesh, Mesh):
        raise ShardingError(
            f"sharding.put(..., {spec})",
            there="no mesh" if mesh is None else "a mesh over described devices",
            must="arrays are put on the real devices of the mesh in force",
            fix="with sharding.mesh(data=-1): ...",
        )
    return jax.tree.map(lambda x: _put(x if isinstance(x, jax.Array) else np.asarray(x), spec, mesh), local)


def _put(x: Any, spec: P, mesh: Mesh) -> jax.Array:
    sizes = dict(mesh.shape)
    asked = f"sharding.put(array of shape {tuple(x.shape)}, {spec})"
    resolved = logical.resolve(spec, tuple(x.shape), sizes, asked=asked)
    sharding = NamedSharding(mesh, to_partition_spec(resolved))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jax.process_count() > 1:
        return jax.make_array_from_process_local_data(sharding, x)
    faults = indivisible(resolved, tuple(x.shape), sizes)
    if faults:
        raise ShardingError(asked, there=faults, must="the axes' sizes divide the dim", fix="a batch that divides")
    return jax.device_put(x, sharding)
