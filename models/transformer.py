"""A stack of transformer blocks, run in a loop or a scan, and the token loss.

- Layers are a list, or one stacked block that is scanned; both start from the same values.
- With `remat` the output of each attention is saved, so the backward pass repeats no forward reduction; or what the
  given policies save, by the names `block_input`, `qkv`, `attention_out` and `mlp_hidden`, and those of kernels.

Shape suffixes as in `transformer_layers`, and L layers, V vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .remat_policy import policies, rematerialised, scan_layers
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
    turn = len(policies(config.remat))
    if config.scan and turn and config.layers % turn:
        wrong.append(f"layers={config.layers} must be a multiple of the {turn} policies of remat to scan them")
    return wrong


def stack(block: Callable[[jax.Array], Block], config: TransformerConfig, key: jax.Array) -> Any:
    """The blocks of a model, each built by `block(key)`: a list, or one stacked `Block` to scan."""
    keys_L = jax.random.split(key, config.layers)
    return jax.vmap(block)(keys_L) if config.scan else nnx.List([block(key) for key in keys_L])


def run(blocks: Any, x_BSM: jax.Array, key: jax.Array | None, config: TransformerConfig) -> jax.Array:
    """The residual stream after all `blocks`; a `key` enables dropout."""
    calls = rematerialised(Block.__call__, config.remat, scan=config.scan)
    keys_L = None if key is None else jax.random.split(key, config.layers)
    if isinstance(blocks, Block):
        scanned = [lambda x, layer, call=call: (call(layer[0], x, layer[1]), None) for call in calls]
        return scan_layers(scanned, x_BSM, (blocks, keys_L))[0]
    for i, block in enumerate(blocks):
        x_BSM = calls[i % len(calls)](block, x_BSM, None if keys_L is None else keys_L[i])
    return x_BSM


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
