"""Noisy top-k router (Shazeer et al.): a linear map with learned noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.stats import norm

from .load_balancing import cv_squared
from .routing import Routing, logits, top_k_experts

LOSS_WEIGHT = 0.1
"""Weight of each loss; the paper's choice, appendix A."""


class NoisyTopK(nnx.Module):
    """Top-k routing by noisy logits, weighted by their softmax.

    Both maps are initialised to 0, so that only noise decides at first; without a key there is no noise, and ties go to
    the first k experts.

    Args:
        features: M.
        num_experts: E.
        top_k: experts per token.
        rngs: unused, for the signature of `RouterFactory`.
        importance_weight: weight of the importance loss.
        load_weight: weight of the load loss.

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
    stddev_GSE: jax.Array,
    k: int,
    key: jax.Array | None,
    *,
    importance_weight: float = LOSS_WEIGHT,
    load_weight: float = LOSS_WEIGHT,
) -> Routing:
    """Top k of H = clean + stddev * noise, weighted by their softmax.

    The losses are CV^2 of Importance_i = sum_x G(x)_i, the weights of an expert, and of Load_i = sum_x P(x, i), its
    selection probabilities; CV^2 is variance over squared mean, and the sums are over all tokens of the call.
    """
    noise = 0.0 if key is None else jax.random.normal(key, clean_GSE.shape)
    noisy_GSE = clean_GSE + stddev_GSE * noise
    value_GSK, experts_GSK = top_k_experts(noisy_GSE, k)
    weights_GSK = jax.nn.softmax(value_GSK)
    hit_GSKE = jax.nn.one_hot(experts_GSK, clean_GSE.shape[-1], dtype=jnp.float32)
    losses = {
        "importance": cv_squared(jnp.einsum("GSK,GSKE->E", weights_GSK, hit_GSKE)),
        "load": cv_squared(jnp.sum(load_probability(clean_GSE, stddev_GSE, noisy_GSE, k), axis=(0, 1))),
    }
    return Routing(
        experts_GSK=experts_GSK,
        weights_GSK=weights_GSK,
        wanted_GSK=jnp.ones(experts_GSK.shape, bool),
        losses=losses,
        auxiliary_loss=importance_weight * losses["importance"] + load_weight * losses["load"],
    )


def load_probability(clean_GSE: jax.Array, stddev_GSE: jax.Array, noisy_GSE: jax.Array, k: int) -> jax.Array:
    """P(x, i), [G, S, E]: the probability that expert i is in the top k if only its own noise is resampled.

    It is Phi((clean_i - t_i) / stddev_i), where t_i is the k-th highest noisy logit of the other experts.

    References:
        Shazeer et al., 2017, appendix A, equations 8 and 9.
    """
    num_experts = clean_GSE.shape[-1]
    if k == num_experts:
        return jnp.ones_like(clean_GSE)
    value_GSK, experts_GSK = top_k_experts(noisy_GSE, k + 1)
    best_GSE = jnp.sum(jax.nn.one_hot(experts_GSK[..., :k], num_experts, dtype=jnp.float32), axis=2) > 0
    kth_GSE = jnp.where(best_GSE, value_GSK[..., k, None], value_GSK[..., k - 1, None])
    return norm.cdf((clean_GSE - kth_GSE) / stddev_GSE)
