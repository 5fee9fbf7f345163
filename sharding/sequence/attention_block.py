"""Blockwise softmax attention: the online-softmax state over blocks of keys, and the gradients of one block.

Query heads are grouped by key/value head. Shape suffixes: B batch, G groups, Q query heads of a group, S
positions of queries, T positions of keys, D features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

Mask = jax.Array | None
"""[S, T], True where a query attends to a key; None: no masking."""


class SoftmaxState(NamedTuple):
    """Online-softmax state over the keys so far, in float32.

    References: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (1805.02867), algorithm 3; Liu
    et al., Ring Attention, 2023 (2310.01889), section 3.
    """

    max_BGQS: jax.Array
    sum_BGQS: jax.Array
    out_BGQSD: jax.Array
    """Unnormalised: not yet divided by the sum."""


def empty_state(q_BGQSD: jax.Array) -> SoftmaxState:
    """The state before any keys."""
    sum_BGQS = jnp.zeros(q_BGQSD.shape[:-1], jnp.float32)
    return SoftmaxState(jnp.full_like(sum_BGQS, -jnp.inf), sum_BGQS, jnp.zeros(q_BGQSD.shape, jnp.float32))


def scores(q_BGQSD: jax.Array, k_BGTD: jax.Array, mask_ST: Mask) -> jax.Array:
    """Attention scores [B, G, Q, S, T], float32; -inf where masked."""
    score_BGQST = jnp.einsum("BGQSD,BGTD->BGQST", q_BGQSD, k_BGTD, preferred_element_type=jnp.float32)
    score_BGQST = score_BGQST / math.sqrt(q_BGQSD.shape[-1])
    return score_BGQST if mask_ST is None else score_BGQST + jnp.where(mask_ST, 0.0, -jnp.inf)[None, None, None]


def update(
    state: SoftmaxState, q_BGQSD: jax.Array, k_BGTD: jax.Array, v_BGTD: jax.Array, mask_ST: Mask
) -> SoftmaxState:
    """The state after another block of keys.

    m' = max(m, max s); l' = l e^(m - m') + sum e^(s - m'); o' likewise with values.
    """
    score_BGQST = scores(q_BGQSD, k_BGTD, mask_ST)
    max_BGQS = jnp.maximum(state.max_BGQS, jnp.max(score_BGQST, axis=-1))
    finite_BGQS = jnp.where(max_BGQS == -jnp.inf, 0, max_BGQS)  # a query may have no unmasked key yet
    weight_BGQST = jnp.exp(score_BGQST - finite_BGQS[..., None])
    rescale_BGQS = jnp.exp(state.max_BGQS - finite_BGQS)
    sum_BGQS = state.sum_BGQS * rescale_BGQS + jnp.sum(weight_BGQST, axis=-1)
    return SoftmaxState(
        max_BGQS, sum_BGQS, state.out_BGQSD * rescale_BGQS[..., None] + weighted_values(weight_BGQST, v_BGTD)
    )


def weighted_values(weight_BGQST: jax.Array, v_BGTD: jax.Array) -> jax.Array:
    """Weighted sum of values, float32."""
    weight_BGQST = weight_BGQST.astype(v_BGTD.dtype)
    return jnp.einsum("BGQST,BGTD->BGQSD", weight_BGQST, v_BGTD, preferred_element_type=jnp.float32)


def finalize(state: SoftmaxState) -> tuple[jax.Array, jax.Array]:
    """The output [B, G, Q, S, D] and the logsumexp of the scores [B, G, Q, S], float32.

    Zero for queries without an unmasked key, which are padding.
    """
    nonempty_BGQS = state.sum_BGQS > 0
    sum_BGQS = jnp.where(nonempty_BGQS, state.sum_BGQS, 1)
    max_BGQS = jnp.where(nonempty_BGQS, state.max_BGQS, 0)
    return state.out_BGQSD / sum_BGQS[..., None], max_BGQS + jnp.log(sum_BGQS)


class QueryResiduals(NamedTuple):
    """Per-query inputs of a block's gradients."""

    q_BGQSD: jax.Array
    dout_BGQSD: jax.Array
    logsumexp_BGQS: jax.Array
    delta_BGQS: jax.Array
    """The sum over features of output times its gradient."""


def gradients(
    queries: QueryResiduals, k_BGTD: jax.Array, v_BGTD: jax.Array, mask_ST: Mask
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A block's contributions to the gradients of queries, keys and values, float32; weights are recomputed.

    References: Dao et al., FlashAttention, 2022 (2205.14135), appendix B.2.
    """
    q_BGQSD, dout_BGQSD, logsumexp_BGQS, delta_BGQS = queries
    weight_BGQST = jnp.exp(scores(q_BGQSD, k_BGTD, mask_ST) - logsumexp_BGQS[..., None])
    dweight_BGQST = jnp.einsum("BGQSD,BGTD->BGQST", dout_BGQSD, v_BGTD, preferred_element_type=jnp.float32)
    dscore_BGQST = weight_BGQST * (dweight_BGQST - delta_BGQS[..., None]) / math.sqrt(q_BGQSD.shape[-1])
    dscore_BGQST, weight_BGQST = dscore_BGQST.astype(q_BGQSD.dtype), weight_BGQST.astype(q_BGQSD.dtype)
    return (
        jnp.einsum("BGQST,BGTD->BGQSD", dscore_BGQST, k_BGTD, preferred_element_type=jnp.float32),
        jnp.einsum("BGQST,BGQSD->BGTD", dscore_BGQST, q_BGQSD, preferred_element_type=jnp.float32),
        jnp.einsum("BGQST,BGQSD->BGTD", weight_BGQST, dout_BGQSD, preferred_element_type=jnp.float32),
    )


def query_residuals(
    q_BGQSD: jax.Array, out_BGQSD: jax.Array, dout_BGQSD: jax.Array, logsumexp_BGQS: jax.Array
) -> QueryResiduals:
    """The per-query inputs of `gradients`, from queries and outputs."""
    delta_BGQS = jnp.sum(out_BGQSD.astype(jnp.float32) * dout_BGQSD.astype(jnp.float32), axis=-1)
    return QueryResiduals(q_BGQSD, dout_BGQSD, logsumexp_BGQS, delta_BGQS)


def group_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[batch, length, heads, head_dim] -> q_BGQSD, k_BGTD, v_BGTD."""
    return group_like(q, k), k.swapaxes(1, 2), v.swapaxes(1, 2)


def group_like(x: jax.Array, k: jax.Array) -> jax.Array:
    """[batch, length, heads, head_dim] -> x_BGQSD, with one group per head of `k`."""
    x_BSGQD = x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])
    return jnp.moveaxis(x_BSGQD, 1, 3)


def ungroup_heads(x_BGQSD: jax.Array) -> jax.Array:
    """x_BGQSD -> [batch, length, heads, head_dim]."""
    x_BSGQD = jnp.moveaxis(x_BGQSD, 3, 1)
    return x_BSGQD.reshape(*x_BSGQD.shape[:2], -1, x_BSGQD.shape[-1])
