"""GShard's router: the best expert of each token, and the second best by chance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from .balance import BALANCE_WEIGHT, balance_loss
from .routing import Routing, check_top_k, gate, highest, logits


class GShard(nnx.Module):
    """Two experts of each token by the softmax of a linear map.

    Args:
        features: M.
        num_experts: E.
        top_k: 2.
        rngs: its `params` stream gives the initial values.
        loss_weight: of E^2 times the loss of balance.

    References:
        Lepikhin et al., GShard, ICLR 2021 (2006.16668), section 2.2 and algorithm 1. The paper leaves the loss's weight
        open.
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
        self.gate = gate(rngs, features, num_experts)

    def __call__(self, x_GSM: jax.Array, key: jax.Array | None = None) -> Routing:
        return top_2(jax.nn.softmax(logits(x_GSM, self.gate[...])), key, loss_weight=self.loss_weight)


def top_2(gates_GSE: jax.Array, key: jax.Array | None, *, loss_weight: float = BALANCE_WEIGHT) -> Routing:
    """The two best experts of each token by its gates, which sum to 1.

    Their weights are g1 / (g1 + g2) and g2 / (g1 + g2). A token goes to the second where twice its weight is more than
    a number drawn from [0, 1), so always from a half on; without a key always.
    """
    gate_GSK, experts_GSK = highest(gates_GSE, 2)
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
