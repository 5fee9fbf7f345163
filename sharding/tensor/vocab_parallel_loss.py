"""Vocab-parallel cross entropy: logits stay sharded over the vocabulary (Megatron-LM).

With the logits z of one position, its target t and sums over the vocabulary,

    loss = log sum_v exp(z_v - m) + m - z_t,  m = max_v z_v,

so three numbers per position are all-reduced over the axis: the maximum, the sum and the target's logit, a masked sum.
The backward pass, d loss / d z_v = softmax(z)_v - [v = t], needs no communication.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShardingError
from .tensor_axis import axis_size, check_dtype, check_ndim, shard_dim
from .vocab_parallel import mask_padding


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    axis: str = "tensor",
    weights: jax.Array | None = None,
    z_loss: float = 0.0,
    vocab: int | None = None,
) -> jax.Array:
    """Mean vocab-parallel cross entropy in nats, float32; communicates a few numbers per position.

    Args:
        logits: [..., vocabulary]; see ``losses``.
        targets: integers [...].
        axis: mesh axis that the vocabulary is sharded over.
        weights: [...], weight of each target; 0 ignores it, even one out of range. Normalises by their sum.
        z_loss: weight of the squared log of the softmax's sum, which keeps logits from drifting.
        vocab: true vocabulary size if padded.

    Raises:
        ShardingError: no mesh in context, no such axis, mismatched shapes, or non-integer targets.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2104.04473), section 2.3;
        Shoeybi et al., Megatron-LM (1909.08053), section 3; z-loss: Chowdhery et al., PaLM (2204.02311), section 5.
    """
    each = losses(logits, targets, axis=axis, z_loss=z_loss, vocab=vocab)
    if weights is None:
        return jnp.mean(each)
    if weights.shape != each.shape:
        found = f"targets {targets.shape}, weights {weights.shape}"
        raise ShardingError(_asked("cross_entropy", axis), found=found, required="weights of the targets' shape")
    weights = weights.astype(each.dtype)
    # The loss is 0 if all weights are 0.
    return jnp.sum(each * weights) / jnp.maximum(jnp.sum(weights), jnp.finfo(each.dtype).tiny)


def losses(
    logits: jax.Array,
    targets: jax.Array,
    *,
    axis: str = "tensor",
    z_loss: float = 0.0,
    vocab: int | None = None,
) -> jax.Array:
    """Vocab-parallel cross entropy of each target in nats, [...], float32.

    If the axis does not divide the vocabulary, the logits are padded with a warning that states the cost; a table of
    ``padded_vocabulary`` rows avoids it. Arguments as in ``cross_entropy``.
    """
    asked = _asked("losses", axis)
    axis_size(asked, axis)
    check_ndim(asked, "logits", logits, 1, or_more=True)
    check_dtype(asked, "logits", logits, np.floating, "floats")
    check_dtype(asked, "targets", targets, np.integer, "integers")
    if targets.shape != logits.shape[:-1]:
        found = f"logits {logits.shape}, targets {targets.shape}"
        raise ShardingError(asked, found=found, required="logits of shape [..., vocabulary], targets [...]")
    z = mask_padding(asked, shard_dim(logits, axis, -1), vocab).astype(jnp.float32)
    highest = jax.lax.stop_gradient(jnp.max(z, axis=-1))
    log_sum = jnp.log(jnp.sum(jnp.exp(z - highest[..., None]), axis=-1)) + highest
    token = jax.lax.broadcasted_iota(targets.dtype, z.shape, z.ndim - 1)
    target = jnp.sum(jnp.where(token == targets[..., None], z, jnp.zeros_like(z)), axis=-1)
    each = log_sum - target
    return each + z_loss * jnp.square(log_sum) if z_loss else each


def _asked(name: str, axis: str) -> str:
    return f"tensor.{name}(logits, targets, axis={axis!r})"
