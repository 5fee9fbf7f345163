"""A stack of transformer blocks, run in a loop or a scan, and the token loss.

- Layers are a list, or one stacked block that is scanned; both start from the same values.
- With `remat` the output of each attention is saved, so the backward pass repeats no forward reduction.

Shape suffixes as in `transformer_layers`, and L layers, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .remat_policy import REMAT_POLICY
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


def config_errors(config: Any, sizes: Iterable[str]) -> list[str]:
    """Errors in the fields that all transformers share; `sizes` names those that must be positive."""
    wrong = [f"{name}={getattr(config, name)} must be at least 1" for name in sizes if getattr(config, name) < 1]
    if wrong:
        return wrong
    if config.features % config.heads:
        wrong.append(f"features={config.features} must be a multiple of heads={config.heads}")
    elif config.positions == "rotary" and config.head_features % 2:
        wrong.append(f"features / heads = {config.head_features} must be even for rotary positions")
    if config.heads % config.kv_heads:
        wrong.append(f"heads={config.heads} must be a multiple of kv_heads={config.kv_heads}")
    if config.positions not in ("rotary", "learned"):
        wrong.append(f"positions={config.positions!r} must be 'rotary' or 'learned'")
    if config.dtype not in ("float32", "bfloat16"):
        wrong.append(f"dtype={config.dtype!r} must be 'float32' or 'bfloat16'")
    if not 0 <= config.dropout < 1:
        wrong.append(f"dropout={config.dropout} must be at least 0 and less than 1")
    return wrong


class Block(nnx.Module):
    """One layer: an attention branch, then an MLP branch, each added to the residual stream.

    Args:
        config: model configuration.
        rngs: initialises parameters from its `params` stream.
        attention, mlp: branch factories.
        norm: number of features -> a norm.
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
        norm: Callable[[int], Callable[[jax.Array], jax.Array]] = RMSNorm,
        order: Literal["pre", "post"] = "pre",
        stream: StreamHooks = NO_HOOKS,
    ):
        self.dropout = config.dropout
        self.stream = stream
        self.order = order
        self.norm1 = norm(config.features)
        self.attention = attention(config, rngs=rngs)
        self.norm2 = norm(config.features)
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
        key1, key2 = (None, None) if key is None else jax.random.split(key)
        branch_input, branch_output = self.stream.branch_input, self.stream.branch_output
        branch_BSM, after = attention(branch_input(x_BSM if self.order == "post" else self.norm1(x_BSM)))
        x_BSM = x_BSM + dropout(checkpoint_name(branch_output(branch_BSM), "attention_out"), self.dropout, key1)
        if self.order == "post":
            x_BSM = self.norm1(x_BSM)
            return self.norm2(x_BSM + dropout(branch_output(self.mlp(branch_input(x_BSM))), self.dropout, key2)), after
        return x_BSM + dropout(branch_output(self.mlp(branch_input(self.norm2(x_BSM)))), self.dropout, key2), after


def stack(block: Callable[[jax.Array], Block], config: TransformerConfig, key: jax.Array) -> Any:
    """The blocks of a model, each built by `block(key)`: a list, or one stacked `Block` to scan."""
    keys_L = jax.random.split(key, config.layers)
    return jax.vmap(block)(keys_L) if config.scan else nnx.List([block(key) for key in keys_L])


def run(blocks: Any, x_BSM: jax.Array, key: jax.Array | None, config: TransformerConfig) -> jax.Array:
    """The residual stream after all `blocks`; a `key` enables dropout."""
    call = _rematerialised(config) if config.remat else Block.__call__
    keys_L = None if key is None else jax.random.split(key, config.layers)
    if isinstance(blocks, Block):
        return jax.lax.scan(lambda x, layer: (call(layer[0], x, layer[1]), None), x_BSM, (blocks, keys_L))[0]
    for i, block in enumerate(blocks):
        x_BSM = call(block, x_BSM, None if keys_L is None else keys_L[i])
    return x_BSM


def _rematerialised(config: TransformerConfig) -> Callable[[Block, jax.Array, jax.Array | None], jax.Array]:
    # Inside a scan the loop already prevents CSE of the two computations.
    return jax.checkpoint(Block.__call__, policy=REMAT_POLICY, prevent_cse=not config.scan)


def loss(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Mean cross entropy in nats of each target, float32.

    Only reductions over the vocabulary: sharding it costs three reductions of [B, S] and no all-gather.
    """
    return jnp.mean(losses(logits_BSV, targets_BS))


def losses(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Cross entropy in nats of each target, [B, S], float32."""
    logits_BSV = logits_BSV.astype(jnp.float32)
    token_BSV = jax.lax.broadcasted_iota(targets_BS.dtype, logits_BSV.shape, logits_BSV.ndim - 1)
    hit_BSV = jnp.where(token_BSV == targets_BS[..., None], logits_BSV, jnp.zeros_like(logits_BSV))
    return jax.nn.logsumexp(logits_BSV, axis=-1) - jnp.sum(hit_BSV, axis=-1)
