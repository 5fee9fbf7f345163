"""Shazeer's router: the k best experts of each token by a linear map with noise of learnt strength."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.stats import norm

from .balance import cv_squared
from .routing import Routing, highest, logits

LOSS_WEIGHT = 0.1
"""Of each loss; the paper's choice, appendix A."""


class NoisyTopK(nnx.Module):
    """The k best experts of each token, by the softmax of their noisy values.

    Both maps begin at 0, so that at first noise alone chooses; a call without a key has none, and takes the first k.

    Args:
        features: M.
        num_experts: E.
        top_k: experts of each token.
        rngs: unused; routers are made alike.
        importance_weight: of the loss of importance.
        load_weight: of the loss of load.

    References:
        Shazeer et al., Outrageously Large Neural Networks, ICLR 2017 (1701.06538), sections 2.1 and 4, appendix A.
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        top_k: int,
        *,
        rngs: nnx.Rngs,
        importance_weight: float = LOSS_WEIGHT,
        load_weight: float = LOSS_WEIGHT,
    ):
        self.top_k, self.importance_weight, self.load_weight = top_k, importance_weight, load_weight
        self.gate = nnx.Param(jnp.zeros((features, num_experts), jnp.float32))
        self.noise = nnx.Param(jnp.zeros((features, num_experts), jnp.float32))

    def __call__(self, x_GSM: jax.Array, key: jax.Array | None = None) -> Routing:
        return noisy_top_k(
            logits(x_GSM, self.gate[...]),
            jax.nn.softplus(logits(x_GSM, self.noise[...])),
            self.top_k,
            key,
            importance_weight=self.importance_weight,
            load_weight=self.load_weight,
        )


def noisy_top_k(
    clean_GSE: jax.Array,
    spread_GSE: jax.Array,
    k: int,
    key: jax.Array | None,
    *,
    importance_weight: float = LOSS_WEIGHT,
    load_weight: float = LOSS_WEIGHT,
) -> Routing:
    """The k best of H = clean + spread * noise, weighted by their softmax.

    The losses are CV^2 of Importance_i = sum_x G(x)_i, the weights that an expert gets, and of Load_i = sum_x P(x, i),
    the chances to be chosen; CV^2 is variance over squared mean, the sums are over all tokens of the call.
    """
    noise = 0.0 if key is None else jax.random.normal(key, clean_GSE.shape)
    noisy_GSE = clean_GSE + spread_GSE * noise
    value_GSK, experts_GSK = highest(noisy_GSE, k)
    weights_GSK = jax.nn.softmax(value_GSK)
    hit_GSKE = jax.nn.one_hot(experts_GSK, clean_GSE.shape[-1], dtype=jnp.float32)
    losses = {
        "importance": cv_squared(jnp.einsum("GSK,GSKE->E", weights_GSK, hit_GSKE)),
        "load": cv_squared(jnp.sum(chance(clean_GSE, spread_GSE, noisy_GSE, k), axis=(0, 1))),
    }
    return Routing(
        experts_GSK=experts_GSK,
        weights_GSK=weights_GSK,
        wanted_GSK=jnp.ones(experts_GSK.shape, bool),
        losses=losses,
        auxiliary_loss=importance_weight * losses["importance"] + load_weight * losses["load"],
    )


def chance(clean_GSE: jax.Array, spread_GSE: jax.Array, noisy_GSE: jax.Array, k: int) -> jax.Array:
    """P(x, i), [G, S, E]: of being among the k best if the noise of this expert alone were drawn again.

    It is Phi((clean_i - t_i) / spread_i), where t_i is the k-th highest of the others' noisy values.

    References:
        Shazeer et al., 2017, appendix A, equations 8 and 9.
    """
    num_experts = clean_GSE.shape[-1]
    if k == num_experts:
        return jnp.ones_like(clean_GSE)
    value_GSK, experts_GSK = highest(noisy_GSE, k + 1)
    best_GSE = jnp.sum(jax.nn.one_hot(experts_GSK[..., :k], num_experts, dtype=jnp.float32), axis=2) > 0
    kth_GSE = jnp.where(best_GSE, value_GSK[..., k, None], value_GSK[..., k - 1, None])
    return norm.cdf((clean_GSE - kth_GSE) / spread_GSE)
