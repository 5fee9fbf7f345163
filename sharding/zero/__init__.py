"""ZeRO stages 1-3 and FSDP: optimizer state, gradients and parameters sharded over a data axis.

In: an optax optimizer and parameters. Out: a sharded optimizer, PartitionSpecs and bytes per device.

Example:
    >>> from sharding import zero
    >>> zero.model_state_bytes(7.5e9, devices=64, stage=3) / 1e9
    1.875
    >>> import optax
    >>> import sharding
    >>> from jax import numpy as jnp
    >>> with sharding.mesh(data=8):
    ...     tx = zero.shard(optax.adamw(1e-3), stage=2, master=True)
    ...     state = tx.init({"w": jnp.ones((64, 16), jnp.bfloat16)})
    >>> isinstance(state, zero.Master), state.weights["w"].dtype, state.weights["w"].sharding.spec
    (True, dtype('float32'), P('data',))
    >>> with sharding.mesh(data=8):
    ...     tx = zero.shard(optax.adamw(1e-3), offload="host", delay_after=40)
    ...     state = tx.init({"w": jnp.ones((64, 16))})
    >>> isinstance(state, zero.Delayed), state.inner[0].mu["w"].sharding.memory_kind
    (True, 'pinned_host')
"""

from .delayed_update import Delayed
from .disk_optimizer import DiskOptimizer
from .layer_streaming import LayerTrainer, Tiled
from .memory_formula import model_state_bytes
from .prefetched_scan import scan
from .sharded_optimizer import Master, Sharded, shard, split
from .state_specs import Specs, specs

__all__ = [
    "Delayed",
    "DiskOptimizer",
    "LayerTrainer",
    "Master",
    "Sharded",
    "Specs",
    "Tiled",
    "model_state_bytes",
    "scan",
    "shard",
    "specs",
    "split",
]
