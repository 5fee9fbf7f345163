"""How evenly experts are used: the losses that make it even, and the figures that say whether it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

BALANCE_WEIGHT = 0.01
"""Of the loss of balance where it is 1 for gates that are all equal: Fedus et al., section 2.2."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Balance:
    """What a layer of experts says of one call; a pytree of arrays."""

    auxiliary_loss: jax.Array
    """Float32, already weighted: add it to the loss."""
    losses: Mapping[str, jax.Array]
    """Its terms by name, as their papers write them."""
    load: jax.Array
    """Choices of each expert, [E] int32, those included for which it has no place."""
    dropped: jax.Array
    """How many choices no place was left for, int32. A token that loses all of its choices has the output 0."""

    @property
    def dropped_share(self) -> jax.Array:
        """Of all choices."""
        return jnp.sum(self.dropped) / jnp.sum(self.load)

    @property
    def peak_load(self) -> jax.Array:
        """Choices of the busiest expert over those of a mean one; 1 is even, the number of experts the worst."""
        return jnp.max(self.load, axis=-1) / jnp.mean(self.load, axis=-1)


def balance_loss(gates_GSE: jax.Array, first_GS: jax.Array) -> jax.Array:
    """The mean over groups of (1 / E) sum_e (c_e / S) m_e.

    c_e is how many tokens of a group have e as their first choice, m_e the mean of their gates for it. Where all gates
    are equal it is 1 / E^2, where all tokens have one and the same expert 1 / E.

    References:
        Lepikhin et al., GShard, ICLR 2021 (2006.16668), section 2.2 and algorithm 1.
    """
    num_experts = gates_GSE.shape[-1]
    share_GE = jnp.mean(jax.nn.one_hot(first_GS, num_experts, dtype=jnp.float32), axis=1)
    return jnp.mean(jnp.mean(share_GE * jnp.mean(gates_GSE, axis=1), axis=-1))


def cv_squared(amount_E: jax.Array) -> jax.Array:
    """The variance of what experts have over the square of its mean: 0 where it is equal, E - 1 where one has all."""
    return jnp.var(amount_E) / jnp.square(jnp.mean(amount_E))
