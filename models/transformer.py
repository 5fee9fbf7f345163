"""A stack of transformer blocks, run in a loop or a scan, and the token loss.

- Layers are a list, or one stacked block that is scanned; both start from the same values.
- With `remat` the output of each attention is saved, so the backward pass repeats no forward reduction.

Shape suffixes as in `transformer_layers`, and L layers, V vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .remat_policy import REMAT_POLICY
from .transformer_block import Block
from .transformer_layers import TransformerConfig


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
    if config.kernels not in ("auto", "xla", "pallas"):
        wrong.append(f"kernels={config.kernels!r} must be 'auto', 'xla' or 'pallas'")
    if not 0 <= config.dropout < 1:
        wrong.append(f"dropout={config.dropout} must be at least 0 and less than 1")
    return wrong


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
