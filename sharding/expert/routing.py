"""The router interface, its result, and functions shared by routers.

Shape suffixes in this package: G groups of tokens, S tokens of a group, K choices per token, E experts, C slots of an
expert per group (its capacity), M features, F hidden features of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import ShardingError


class Routing(NamedTuple):
    """The experts chosen for each token, best first."""

    experts_GSK: jax.Array
    """Expert indices, int32."""
    weights_GSK: jax.Array
    """Weights of the experts' outputs, float32."""
    wanted_GSK: jax.Array
    """Whether the choice is dispatched."""
    losses: Mapping[str, jax.Array]
    """Unweighted auxiliary losses by name, as their papers define them; minimal for balanced loads."""
    auxiliary_loss: jax.Array
    """Weighted sum of the losses, to add to the training loss."""


class Router(Protocol):
    """A router module: x_GSM and a key (None: deterministic) -> `Routing`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from sharding import expert
        >>> class RoundRobin(nnx.Module):
        ...     def __init__(self, features, num_experts, top_k, *, rngs):
        ...         self.num_experts = num_experts
        ...
        ...     def __call__(self, x_GSM, key=None):
        ...         groups, tokens, _ = x_GSM.shape
        ...         experts = jnp.broadcast_to(jnp.arange(tokens) % self.num_experts, (groups, tokens))[..., None]
        ...         weights, wanted = jnp.ones(experts.shape), jnp.ones(experts.shape, bool)
        ...         return expert.Routing(experts, weights, wanted, {}, jnp.zeros(()))
        >>> layer = expert.MoE(
        ...     features=16, hidden=32, num_experts=4, top_k=1, axis=None, router=RoundRobin, rngs=nnx.Rngs(0)
        ... )
        >>> layer(jnp.ones((2, 8, 16)))[1].load
        Array([4, 4, 4, 4], dtype=int32)
    """

    def __call__(self, x_GSM: jax.Array, key: jax.Array | None = None) -> Routing: ...


class RouterFactory(Protocol):
    """Factory of a router, such as its class."""

    def __call__(self, features: int, num_experts: int, top_k: int, *, rngs: nnx.Rngs) -> Router: ...


def router_weights(rngs: nnx.Rngs, features: int, num_experts: int) -> nnx.Param[jax.Array]:
    """Initial weights [M, E] of a linear router, of variance 1 / M, float32."""
    return nnx.Param(jax.random.normal(rngs.params(), (features, num_experts), jnp.float32) / math.sqrt(features))


def logits(x_GSM: jax.Array, gate_ME: jax.Array) -> jax.Array:
    """Router logits [G, S, E], always float32."""
    return jnp.einsum("GSM,ME->GSE", x_GSM.astype(jnp.float32), gate_ME)


def top_k_experts(values_GSE: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k highest values of each token and their experts, [G, S, K] each; ties go to the first.

    Uses k argmaxes and one-hot products: XLA all-gathers the operand of `top_k`, and a gather's gradient is a scatter.
    """
    remaining_GSE, found = jax.lax.stop_gradient(values_GSE), []
    for _ in range(k):
        found.append(jnp.argmax(remaining_GSE, axis=-1))
        hit_GSE = jax.nn.one_hot(found[-1], remaining_GSE.shape[-1], dtype=bool)
        remaining_GSE = jnp.where(hit_GSE, -jnp.inf, remaining_GSE)
    experts_GSK = jnp.stack(found, axis=-1)
    hit_GSKE = jax.nn.one_hot(experts_GSK, values_GSE.shape[-1], dtype=values_GSE.dtype)
    return jnp.einsum("GSKE,GSE->GSK", hit_GSKE, values_GSE), experts_GSK


def check_top_k(asked: str, top_k: int, supported: int) -> None:
    """Raises if a router with a fixed top_k is given another."""
    if top_k != supported:
        raise ShardingError(f"{asked}(top_k={top_k})", required=f"top_k={supported}", fix=f"top_k={supported}")
