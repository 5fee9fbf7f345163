"""Mixture-of-experts layers: routers, experts sharded over an axis, and token dispatch and combine.

In: tokens [batch, length, features] and a key. Out: the layer's output, its auxiliary loss and load statistics.

Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from sharding import expert
    >>> layer = expert.MoE(features=16, hidden=32, num_experts=4, top_k=2, axis=None, rngs=nnx.Rngs(0))
    >>> y, balance = layer(jnp.ones((2, 8, 16)))
    >>> y.shape, balance.load.shape
    ((2, 8, 16), (4,))
    >>> x_GSM = jnp.ones((2, 8, 16))
    >>> routing = expert.GShard(16, 4, rngs=nnx.Rngs(0))(x_GSM)
    >>> routing.experts_GSK.shape, list(routing.losses)
    ((2, 8, 2), ['balance'])
    >>> expert.Switch(16, 4, rngs=nnx.Rngs(0))(x_GSM).experts_GSK.shape
    (2, 8, 1)
    >>> expert.NoisyTopK(16, 4, 3, rngs=nnx.Rngs(0))(x_GSM).experts_GSK.shape
    (2, 8, 3)
"""

from .gshard import GShard
from .layer import MoE
from .load_balancing import Balance
from .noisy_top_k import NoisyTopK
from .routing import Router, Routing
from .switch import Switch

__all__ = ["Balance", "GShard", "MoE", "NoisyTopK", "Router", "Routing", "Switch"]
