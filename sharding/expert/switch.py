"""Switch Transformer's top-1 router."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from .load_balancing import BALANCE_WEIGHT, balance_loss
from .routing import Routing, check_top_k, logits, router_weights, top_k_experts


class Switch(nnx.Module):
    """Top-1 routing by the softmax of a linear map; the gate weights the expert's output.

    Args:
        features: M.
        num_experts: E.
        top_k: 1.
        rngs: initialises parameters from its `params` stream.
        loss_weight: weight of E^2 times the load-balancing loss, the paper's E sum_e f_e P_e.

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
        self.gate = router_weights(rngs, features, num_experts)

    def __call__(self, x_GSM: jax.Array, key: jax.Array | None = None) -> Routing:
        """The routing; `key` is unused, it is deterministic."""
        return top_1(jax.nn.softmax(logits(x_GSM, self.gate[...])), loss_weight=self.loss_weight)


def top_1(gates_GSE: jax.Array, *, loss_weight: float = BALANCE_WEIGHT) -> Routing:
    """Top-1 routing by gates that sum to 1."""
    weights_GSK, experts_GSK = top_k_experts(gates_GSE, 1)
    loss = balance_loss(gates_GSE, experts_GSK[..., 0])
    return Routing(
        experts_GSK=experts_GSK,
        weights_GSK=weights_GSK,
        wanted_GSK=jnp.ones(experts_GSK.shape, bool),
        losses={"balance": loss},
        auxiliary_loss=loss_weight * gates_GSE.shape[-1] ** 2 * loss,
    )
