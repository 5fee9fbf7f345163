"""`put`: global arrays from the local data of each process."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..annotations import axis_rules
from ..errors import ShardingError
from ..mesh import current
from ..spec import indivisible, to_partition_spec


def put(local: Any, spec: P = P()) -> Any:  # noqa: B008 an immutable value
    """Makes global arrays from the local data of all processes.

    Args:
        local: a pytree of numpy or JAX arrays: the global data with one process, this process's shard with several.
            Arrays already on devices of several processes, such as those JAX creates under such a mesh, are resharded.
        spec: the spec of the global arrays; usually the first dim of a batch is sharded over `data`.

    Raises:
        ShardingError: no mesh over real devices, an invalid spec, or a dim not divisible by its axes.

    Example:
        >>> import numpy as np
        >>> import sharding
        >>> from sharding import P
        >>> with sharding.mesh(data=2, tensor=4):
        ...     x = sharding.put(np.ones((8, 4)), P("data"))
        >>> x.sharding.spec, x.addressable_shards[0].data.shape
        (P('data',), (4, 4))
    """
    mesh = current()
    if not isinstance(mesh, Mesh):
        raise ShardingError(
            f"sharding.put(..., {spec})",
            found="no mesh" if mesh is None else "a mesh over described devices",
            required="a current mesh over real devices",
            fix="with sharding.mesh(data=-1): ...",
        )
    return jax.tree.map(lambda x: _put(x if isinstance(x, jax.Array) else np.asarray(x), spec, mesh), local)


def _put(x: Any, spec: P, mesh: Mesh) -> jax.Array:
    sizes = dict(mesh.shape)
    asked = f"sharding.put(array of shape {tuple(x.shape)}, {spec})"
    resolved = axis_rules.resolve(spec, tuple(x.shape), sizes, asked=asked)
    sharding = NamedSharding(mesh, to_partition_spec(resolved))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jax.process_count() > 1:
        return jax.make_array_from_process_local_data(sharding, x)
    faults = indivisible(resolved, tuple(x.shape), sizes)
    if faults:
        raise ShardingError(
            asked,
            found=faults,
            required="a dim divisible by the product of its axis sizes",
            fix="a divisible batch size",
        )
    return jax.device_put(x, sharding)
