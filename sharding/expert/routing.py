"""What a router decides of each token, and how one is asked.

Letters here and in its neighbours: G groups of tokens, S tokens of a group, K choices of a token, E experts, C places
of an expert for a group, M features, F hidden features of an expert.
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
    """The experts of each token, best first."""

    experts_GSK: jax.Array
    """Their numbers, int32."""
    weights_GSK: jax.Array
    """What their outputs count for, float32."""
    wanted_GSK: jax.Array
    """Whether the token goes there at all."""
    losses: Mapping[str, jax.Array]
    """Each auxiliary loss as its paper writes it, by name; 0 or least where experts get equal shares."""
    auxiliary_loss: jax.Array
    """Their weighted sum, to be added to what is trained."""


class Router(Protocol):
    """A module that chooses: x_GSM and a key, or None for no randomness, give a `Routing`."""

    def __call__(self, x_GSM: jax.Array, key: jax.Array | None = None) -> Routing: ...


class MakesRouter(Protocol):
    """What makes one, such as a class."""

    def __call__(self, features: int, num_experts: int, top_k: int, *, rngs: nnx.Rngs) -> Router: ...


def gate(rngs: nnx.Rngs, features: int, num_experts: int) -> nnx.Param[jax.Array]:
    """Initial weights [M, E] of a linear router, variance 1 / M, float32."""
    return nnx.Param(jax.random.normal(rngs.params(), (features, num_experts), jnp.float32) / math.sqrt(features))


def logits(x_GSM: jax.Array, gate_ME: jax.Array) -> jax.Array:
    """What a linear router thinks of each expert, [G, S, E], in float32 whatever the tokens are."""
    return jnp.einsum("GSM,ME->GSE", x_GSM.astype(jnp.float32), gate_ME)


def highest(values_GSE: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k highest values of each token and their numbers, [G, S, K] each; of equal ones the first.

    By k maxima and products: XLA gathers whole arrays for its own `top_k`, and the derivative of a gather is a scatter.
    """
    left_GSE, found = jax.lax.stop_gradient(values_GSE), []
    for _ in range(k):
        found.append(jnp.argmax(left_GSE, axis=-1))
        hit_GSE = jax.nn.one_hot(found[-1], left_GSE.shape[-1], dtype=bool)
        left_GSE = jnp.where(hit_GSE, -jnp.inf, left_GSE)
    experts_GSK = jnp.stack(found, axis=-1)
    hit_GSKE = jax.nn.one_hot(experts_GSK, values_GSE.shape[-1], dtype=values_GSE.dtype)
    return jnp.einsum("GSKE,GSE->GSK", hit_GSKE, values_GSE), experts_GSK


def check_top_k(asked: str, top_k: int, must_be: int) -> None:
    """Raises where a router of one number of choices is asked for another."""
    if top_k != must_be:
        raise ShardingError(f"{asked}(top_k={top_k})", must=f"it chooses {must_be}", fix=f"top_k={must_be}")
