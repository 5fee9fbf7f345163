"""Cross entropy of logits that stay split over the vocabulary.

With logits z of one position, its target t and the sums over the vocabulary,

    loss = log sum_v exp(z_v - m) + m - z_t,  m = max_v z_v,

so three numbers for each position are reduced over the axis: the maximum, the sum and the target's logit, which is a
sum over whether a token is the target. In the backward, d loss / d z_v = softmax(z)_v - [v = t], nothing is sent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShardingError
from .axis import check_dtype, check_ndim, size_of, split_dim
from .vocabulary import masked


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    axis: str = "tensor",
    weights: jax.Array | None = None,
    z_loss: float = 0.0,
    vocab: int | None = None,
) -> jax.Array:
    """Mean cross entropy in nats, a float32; nothing larger than a few numbers for each position is communicated.

    Args:
        logits: [..., vocabulary]; see ``losses``.
        targets: integers [...].
        axis: of the mesh, which splits the vocabulary.
        weights: [...], how much each target counts: 0 leaves it out, whatever its number. The mean is over their sum.
        z_loss: how much the square of the logarithm of softmax's sum adds, which keeps logits from drifting.
        vocab: how many of the tokens there are where the vocabulary is padded.

    Raises:
        ShardingError: no mesh in force, no such axis; shapes that don't fit, targets that are no integers.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2104.04473), section 2.3;
        Shoeybi et al., Megatron-LM (1909.08053), section 3; z-loss: Chowdhery et al., PaLM (2204.02311), section 5.
    """
    each = losses(logits, targets, axis=axis, z_loss=z_loss, vocab=vocab)
    if weights is None:
        return jnp.mean(each)
    if weights.shape != each.shape:
        there = f"targets {targets.shape}, weights {weights.shape}"
        raise ShardingError(_asked("cross_entropy", axis), there=there, must="each target has a weight")
    weights = weights.astype(each.dtype)
    # Where nothing counts the loss is 0.
    return jnp.sum(each * weights) / jnp.maximum(jnp.sum(weights), jnp.finfo(each.dtype).tiny)


def losses(
    logits: jax.Array,
    targets: jax.Array,
    *,
    axis: str = "tensor",
    z_loss: float = 0.0,
    vocab: int | None = None,
) -> jax.Array:
    """The cross entropy of each target in nats, [...] in float32.

    Where the axis does not divide the vocabulary the logits are padded, with a warning that says what that costs; with
    ``padded_vocabulary`` rows of the table nothing is. Arguments as in ``cross_entropy``.
    """
    asked = _asked("losses", axis)
    size_of(asked, axis)
    check_ndim(asked, "logits", logits, 1)
    check_dtype(asked, "logits", logits, np.floating, "floats")
    check_dtype(asked, "targets", targets, np.integer, "integers")
    if targets.shape != logits.shape[:-1]:
        there = f"logits {logits.shape}, targets {targets.shape}"
        raise ShardingError(asked, there=there, must="logits are [..., vocabulary] and targets [...]")
    z = masked(asked, split_dim(logits, axis, -1), vocab).astype(jnp.float32)
    highest = jax.lax.stop_gradient(jnp.max(z, axis=-1))
    log_sum = jnp.log(jnp.sum(jnp.exp(z - highest[..., None]), axis=-1)) + highest
    token = jax.lax.broadcasted_iota(targets.dtype, z.shape, z.ndim - 1)
    target = jnp.sum(jnp.where(token == targets[..., None], z, jnp.zeros_like(z)), axis=-1)
    each = log_sum - target
    return each + z_loss * jnp.square(log_sum) if z_loss else each


def _asked(what: str, axis: str) -> str:
    return f"tensor.{what}(logits, targets, axis={axis!r})"
