"""GShard's top-2 router: the second expert is dispatched at random."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from .load_balancing import BALANCE_WEIGHT, balance_loss
from .routing import Routing, check_top_k, logits, router_weights, top_k_experts


class GShard(nnx.Module):
    """Top-2 routing by the softmax of a linear map.

    Args:
        features: M.
        num_experts: E.
        top_k: 2.
        rngs: initialises parameters from its `params` stream.
        loss_weight: weight of E^2 times the load-balancing loss.

    References:
        Lepikhin et al., GShard, ICLR 2021 (2006.16668), section 2.2 and algorithm 1. The paper does not give the
        loss weight.
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        top_k: int = 2,
        *,
        rngs: nnx.Rngs,
        loss_weight: float = BALANCE_WEIGHT,
    ):
        check_top_k("expert.GShard", top_k, 2)
        self.loss_weight = loss_weight
        self.gate = router_weights(rngs, features, num_experts)

    def __call__(self, x_GSM: jax.Array, key: jax.Array | None = None) -> Routing:
        return top_2(jax.nn.softmax(logits(x_GSM, self.gate[...])), key, loss_weight=self.loss_weight)


def top_2(gates_GSE: jax.Array, key: jax.Array | None, *, loss_weight: float = BALANCE_WEIGHT) -> Routing:
    """Top-2 routing by gates that sum to 1.

    The weights are g1 / (g1 + g2) and g2 / (g1 + g2). The second expert is dispatched if twice its weight exceeds a
    uniform sample from [0, 1), so always from 0.5 on; without a key always.
    """
    gate_GSK, experts_GSK = top_k_experts(gates_GSE, 2)
    weights_GSK = gate_GSK / jnp.sum(gate_GSK, axis=-1, keepdims=True)
    first_GS, second_GS = jnp.ones(gates_GSE.shape[:2], bool), jnp.ones(gates_GSE.shape[:2], bool)
    if key is not None:
        second_GS = 2 * weights_GSK[..., 1] > jax.random.uniform(key, second_GS.shape)
    loss = balance_loss(gates_GSE, experts_GSK[..., 0])
    return Routing(
        experts_GSK=experts_GSK,
        weights_GSK=weights_GSK,
        wanted_GSK=jnp.stack([first_GS, second_GS], axis=-1),
        losses={"balance": loss},
        auxiliary_loss=loss_weight * gates_GSE.shape[-1] ** 2 * loss,
    )
