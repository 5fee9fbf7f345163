"""One transformer block: the order of attention, MLP, norms and residual stream.

Shape suffixes as in `transformer_layers`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .transformer_layers import Attention, Branch, KVCache, RMSNorm, TransformerConfig, dropout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamHooks:
    """Value-preserving hooks between the residual stream and the branches, such as sharding changes."""

    branch_input: Callable[[jax.Array], jax.Array] = lambda x_BSM: x_BSM
    """Applied to the input of each branch and of the logits."""
    branch_output: Callable[[jax.Array], jax.Array] = lambda x_BSM: x_BSM
    """Applied to the output of each branch and of the embedding."""


NO_HOOKS = StreamHooks()
"""Identity hooks."""


class Block(nnx.Module):
    """One layer: an attention branch, then an MLP branch, each added to the residual stream.

    Args:
        config: model configuration.
        rngs: initialises parameters from its `params` stream.
        attention, mlp: branch factories.
        norm: (number of features, implementation) -> a norm.
        order: `pre` normalises the input of each branch, `post` the residual stream after each.
        stream: see `StreamHooks`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rngs: nnx.Rngs,
        attention: Branch,
        mlp: Branch,
        norm: Callable[[int, str], Callable[[jax.Array], jax.Array]] = RMSNorm,
        order: Literal["pre", "post"] = "pre",
        stream: StreamHooks = NO_HOOKS,
    ):
        self.dropout = config.dropout
        self.stream = stream
        self.order = order
        self.norm1 = norm(config.features, config.kernels)
        self.attention = attention(config, rngs=rngs)
        self.norm2 = norm(config.features, config.kernels)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x_BSM: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return self._run(lambda x_BSM: (self.attention(x_BSM), None), x_BSM, key)[0]

    def continued(self, x_BSM: jax.Array, past: KVCache) -> tuple[jax.Array, KVCache]:
        """The block for a slice of a sequence, without dropout; returns the updated cache too."""
        attention = self.attention
        if not isinstance(attention, Attention):
            raise ValueError(f"Block.continued: {type(attention).__name__} takes no cache of earlier slices")
        return self._run(lambda x_BSM: attention.continued(x_BSM, past), x_BSM, None)

    def _run(
        self, attention: Callable[[jax.Array], tuple[jax.Array, Any]], x_BSM: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        x_BSM = checkpoint_name(x_BSM, "block_input")
        key1, key2 = (None, None) if key is None else jax.random.split(key)
        branch_input, branch_output = self.stream.branch_input, self.stream.branch_output
        branch_BSM, after = attention(branch_input(x_BSM if self.order == "post" else self.norm1(x_BSM)))
        x_BSM = x_BSM + dropout(checkpoint_name(branch_output(branch_BSM), "attention_out"), self.dropout, key1)
        if self.order == "post":
            x_BSM = self.norm1(x_BSM)
            return self.norm2(x_BSM + dropout(branch_output(self.mlp(branch_input(x_BSM))), self.dropout, key2)), after
        return x_BSM + dropout(branch_output(self.mlp(branch_input(self.norm2(x_BSM)))), self.dropout, key2), after
