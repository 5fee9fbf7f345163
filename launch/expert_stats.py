"""What a run logs of its experts: the load of the busiest one, dropped tokens and auxiliary losses of all layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding import expert


class ExpertStats(NamedTuple):
    """Expert load of one or more layers; float32."""

    auxiliary_loss: jax.Array
    peak_load: jax.Array
    """Choices of the busiest expert over the mean, in the most unbalanced layer."""
    dropped: jax.Array
    """Token choices dropped for lack of capacity."""
    choices: jax.Array

    @classmethod
    def of(cls, balance: expert.Balance) -> "ExpertStats":
        """The statistics of one layer, or of stacked layers."""
        counts = jnp.sum(balance.dropped), jnp.sum(balance.load)
        dropped, choices = (count.astype(jnp.float32) for count in counts)
        return cls(jnp.sum(balance.auxiliary_loss), jnp.max(balance.peak_load), dropped, choices)

    def add(self, balance: expert.Balance) -> "ExpertStats":
        """These statistics with those of further layers."""
        more = ExpertStats.of(balance)
        return ExpertStats(
            self.auxiliary_loss + more.auxiliary_loss,
            jnp.maximum(self.peak_load, more.peak_load),
            self.dropped + more.dropped,
            self.choices + more.choices,
        )
