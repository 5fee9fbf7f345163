"""Load balance of experts: auxiliary losses and load statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

BALANCE_WEIGHT = 0.01
"""Weight of the load-balancing loss scaled to 1 for uniform gates: Fedus et al., section 2.2."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Balance:
    """Auxiliary loss and load statistics of one MoE call, a pytree of arrays."""

    auxiliary_loss: jax.Array
    """Weighted sum of `losses`, float32; add it to the training loss."""
    losses: Mapping[str, jax.Array]
    """Unweighted terms by name, as their papers define them."""
    load: jax.Array
    """Choices per expert, [E] int32, including dropped ones."""
    dropped: jax.Array
    """Number of choices dropped for lack of capacity, int32. A token with all choices dropped has output 0."""

    @property
    def dropped_share(self) -> jax.Array:
        """Fraction of choices dropped."""
        return jnp.sum(self.dropped) / jnp.sum(self.load)

    @property
    def peak_load(self) -> jax.Array:
        """Maximum over mean load of the experts: 1 is balanced, E the worst case."""
        return jnp.max(self.load, axis=-1) / jnp.mean(self.load, axis=-1)


def balance_loss(gates_GSE: jax.Array, first_GS: jax.Array) -> jax.Array:
    """Load-balancing loss: the mean over groups of (1 / E) sum_e (c_e / S) m_e.

    c_e is the number of tokens in a group with e as first choice, m_e the mean gate of e over the group. It is 1 / E^2
    for uniform gates and 1 / E if all tokens choose the same expert.

    References:
        Lepikhin et al., GShard, ICLR 2021 (2006.16668), section 2.2 and algorithm 1.
    """
    num_experts = gates_GSE.shape[-1]
    share_GE = jnp.mean(jax.nn.one_hot(first_GS, num_experts, dtype=jnp.float32), axis=1)
    return jnp.mean(jnp.mean(share_GE * jnp.mean(gates_GSE, axis=1), axis=-1))


def cv_squared(amount_E: jax.Array) -> jax.Array:
    """Squared coefficient of variation over experts: 0 if equal, E - 1 if one expert has everything."""
    return jnp.var(amount_E) / jnp.square(jnp.mean(amount_E))
