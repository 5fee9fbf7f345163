"""Mixtures of experts: routers, experts on an axis of the mesh, and the way of tokens to them and back.

Example:
    >>> from flax import nnx
    >>> from sharding import expert
    >>> layer = expert.MoE(features=16, hidden=32, num_experts=4, top_k=2, axis=None, rngs=nnx.Rngs(0))
    >>> y, balance = layer(jax.numpy.ones((2, 8, 16)))
    >>> y.shape, balance.load.shape
    ((2, 8, 16), (4,))
"""

from .balance import Balance
from .gshard import GShard
from .layer import MoE
from .noisy_top_k import NoisyTopK
from .routing import Router, Routing
from .switch import Switch

__all__ = ["Balance", "GShard", "MoE", "NoisyTopK", "Router", "Routing", "Switch"]
