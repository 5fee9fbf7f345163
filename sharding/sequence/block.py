"""Softmax attention of some queries to some keys: what is kept between blocks of keys, and the gradients of one.

Heads come in groups that share keys and values. Shape suffixes: B batch, G groups, Q query heads of a group, S
positions of queries, T positions of keys, D features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

Seen = jax.Array | None
"""[S, T]: whether a query sees a key; None: all see all."""


class State(NamedTuple):
    """Softmax over the keys so far, in float32.

    References: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (1805.02867), algorithm 3; Liu
    et al., Ring Attention, 2023 (2310.01889), section 3.
    """

    highest_BGQS: jax.Array
    sum_BGQS: jax.Array
    out_BGQSD: jax.Array
    """Not yet divided by the sum."""


def nothing(q_BGQSD: jax.Array) -> State:
    """No keys yet."""
    sum_BGQS = jnp.zeros(q_BGQSD.shape[:-1], jnp.float32)
    return State(jnp.full_like(sum_BGQS, -jnp.inf), sum_BGQS, jnp.zeros(q_BGQSD.shape, jnp.float32))


def scores(q_BGQSD: jax.Array, k_BGTD: jax.Array, seen_ST: Seen) -> jax.Array:
    """[B, G, Q, S, T], float32; minus infinity where a query does not see a key."""
    score_BGQST = jnp.einsum("BGQSD,BGTD->BGQST", q_BGQSD, k_BGTD, preferred_element_type=jnp.float32)
    score_BGQST = score_BGQST / math.sqrt(q_BGQSD.shape[-1])
    return score_BGQST if seen_ST is None else score_BGQST + jnp.where(seen_ST, 0.0, -jnp.inf)[None, None, None]


def add(state: State, q_BGQSD: jax.Array, k_BGTD: jax.Array, v_BGTD: jax.Array, seen_ST: Seen) -> State:
    """With a block of keys more: m' = max(m, max s); l' = l e^(m - m') + sum e^(s - m'); o' likewise with values."""
    score_BGQST = scores(q_BGQSD, k_BGTD, seen_ST)
    highest_BGQS = jnp.maximum(state.highest_BGQS, jnp.max(score_BGQST, axis=-1))
    finite_BGQS = jnp.where(highest_BGQS == -jnp.inf, 0, highest_BGQS)  # a query may have seen no key yet
    weight_BGQST = jnp.exp(score_BGQST - finite_BGQS[..., None])
    fade_BGQS = jnp.exp(state.highest_BGQS - finite_BGQS)
    sum_BGQS = state.sum_BGQS * fade_BGQS + jnp.sum(weight_BGQST, axis=-1)
    return State(highest_BGQS, sum_BGQS, state.out_BGQSD * fade_BGQS[..., None] + mixed(weight_BGQST, v_BGTD))


def mixed(weight_BGQST: jax.Array, v_BGTD: jax.Array) -> jax.Array:
    """The weighted sum of values, float32."""
    weight_BGQST = weight_BGQST.astype(v_BGTD.dtype)
    return jnp.einsum("BGQST,BGTD->BGQSD", weight_BGQST, v_BGTD, preferred_element_type=jnp.float32)


def result(state: State) -> tuple[jax.Array, jax.Array]:
    """The output [B, G, Q, S, D], float32, and the logarithm of each softmax's sum [B, G, Q, S].

    Zero where a query, one of padding, has seen no key.
    """
    has_BGQS = state.sum_BGQS > 0
    sum_BGQS = jnp.where(has_BGQS, state.sum_BGQS, 1)
    highest_BGQS = jnp.where(has_BGQS, state.highest_BGQS, 0)
    return state.out_BGQSD / sum_BGQS[..., None], highest_BGQS + jnp.log(sum_BGQS)


class Queries(NamedTuple):
    """What the gradients of a block need of its queries."""

    q_BGQSD: jax.Array
    dout_BGQSD: jax.Array
    logsumexp_BGQS: jax.Array
    delta_BGQS: jax.Array
    """The sum over features of output times its gradient."""


def gradients(
    queries: Queries, k_BGTD: jax.Array, v_BGTD: jax.Array, seen_ST: Seen
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a block of keys adds to the gradients of queries, keys and values, float32; weights are computed again.

    References: Dao et al., FlashAttention, 2022 (2205.14135), appendix B.2.
    """
    q_BGQSD, dout_BGQSD, logsumexp_BGQS, delta_BGQS = queries
    weight_BGQST = jnp.exp(scores(q_BGQSD, k_BGTD, seen_ST) - logsumexp_BGQS[..., None])
    dweight_BGQST = jnp.einsum("BGQSD,BGTD->BGQST", dout_BGQSD, v_BGTD, preferred_element_type=jnp.float32)
    dscore_BGQST = weight_BGQST * (dweight_BGQST - delta_BGQS[..., None]) / math.sqrt(q_BGQSD.shape[-1])
    dscore_BGQST, weight_BGQST = dscore_BGQST.astype(q_BGQSD.dtype), weight_BGQST.astype(q_BGQSD.dtype)
    return (
        jnp.einsum("BGQST,BGTD->BGQSD", dscore_BGQST, k_BGTD, preferred_element_type=jnp.float32),
        jnp.einsum("BGQST,BGQSD->BGTD", dscore_BGQST, q_BGQSD, preferred_element_type=jnp.float32),
        jnp.einsum("BGQST,BGQSD->BGTD", weight_BGQST, dout_BGQSD, preferred_element_type=jnp.float32),
    )


def queries(q_BGQSD: jax.Array, out_BGQSD: jax.Array, dout_BGQSD: jax.Array, logsumexp_BGQS: jax.Array) -> Queries:
    """What gradients need, of queries and their outputs."""
    delta_BGQS = jnp.sum(out_BGQSD.astype(jnp.float32) * dout_BGQSD.astype(jnp.float32), axis=-1)
    return Queries(q_BGQSD, dout_BGQSD, logsumexp_BGQS, delta_BGQS)


def by_group(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q_BGQSD, k_BGTD and v_BGTD of [batch, length, heads, head_dim]."""
    return like_queries(q, k), k.swapaxes(1, 2), v.swapaxes(1, 2)


def like_queries(x: jax.Array, k: jax.Array) -> jax.Array:
    """x_BGQSD of [batch, length, heads, head_dim], in the groups of such keys."""
    x_BSGQD = x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])
    return jnp.moveaxis(x_BSGQD, 1, 3)


def by_position(x_BGQSD: jax.Array) -> jax.Array:
    """[batch, length, heads, head_dim] of queries in groups."""
    x_BSGQD = jnp.moveaxis(x_BGQSD, 3, 1)
    return x_BSGQD.reshape(*x_BSGQD.shape[:2], -1, x_BSGQD.shape[-1])
