"""The Switch transformer's router: one expert of each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from .balance import BALANCE_WEIGHT, balance_loss
from .routing import Routing, check_top_k, gate, highest, logits


class Switch(nnx.Module):
    """The best expert of each token by the softmax of a linear map, whose output counts for its gate.

    Args:
        features: M.
        num_experts: E.
        top_k: 1.
        rngs: its `params` stream gives the initial values.
        loss_weight: of E^2 times the loss of balance, which is the paper's E sum_e f_e P_e.

    References:
        Fedus et al., Switch Transformers, JMLR 2022 (2101.03961), sections 2.1 and 2.2.
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        top_k: int = 1,
        *,
        rngs: nnx.Rngs,
        loss_weight: float = BALANCE_WEIGHT,
    ):
        check_top_k("expert.Switch", top_k, 1)
        self.loss_weight = loss_weight
        self.gate = gate(rngs, features, num_experts)

    def __call__(self, x_GSM: jax.Array, key: jax.Array | None = None) -> Routing:
        """Nothing in it is random."""
        return top_1(jax.nn.softmax(logits(x_GSM, self.gate[...])), loss_weight=self.loss_weight)


def top_1(gates_GSE: jax.Array, *, loss_weight: float = BALANCE_WEIGHT) -> Routing:
    """The best expert of each token by its gates, which sum to 1."""
    weights_GSK, experts_GSK = highest(gates_GSE, 1)
    loss = balance_loss(gates_GSE, experts_GSK[..., 0])
    return Routing(
        experts_GSK=experts_GSK,
        weights_GSK=weights_GSK,
        wanted_GSK=jnp.ones(experts_GSK.shape, bool),
        losses={"balance": loss},
        auxiliary_loss=loss_weight * gates_GSE.shape[-1] ** 2 * loss,
    )
