"""cuDNN's fused attention, through `jax.nn.dot_product_attention`, whose ops have factor rules of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import compat
from ..mesh import platform
from .attention_masks import Scores

MOST_FEATURES = 128
"""Of a head; more only on Hopper, which can't be told when compiling for described devices."""


def obstacle(q: Any, k: Any, _: Any, *, scores: Scores, segments: Any, return_stats: bool) -> str:
    """Why cuDNN can't run an attention, or an empty text."""
    band = scores.band
    if platform() != "gpu":
        return f"a mesh of GPUs; here are {platform().upper()}s"
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        return "float16 or bfloat16"
    if q.shape[3] % 8 or q.shape[3] > MOST_FEATURES:
        return f"a multiple of 8 features, at most {MOST_FEATURES}"
    if segments:
        return "no segment_ids"
    if return_stats:
        return "no return_stats: JAX rounds cuDNN's statistics to 16 bits and drops their gradient"
    if band.is_bounded and band.after != 0:
        return "a window without keys after a query"
    if band.before is not None and q.shape[1] > k.shape[1]:
        return "a window with at most as many queries as keys"
    if band.before is not None and _is_odd(q, k):
        return "a window with even lengths"
    return ""


def attend(scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention [B, T, H, D]."""
    compat.assume_cudnn()
    before, is_causal = scores.band.before, scores.band.after == 0
    window = None if before is None else (before, 0)
    num_queries, lengths = q.shape[1], None
    if _is_odd(q, k):  # its gradient is of even lengths
        lengths = jnp.full(q.shape[0], k.shape[1], jnp.int32)
        q, k, v = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scores.scale,
        is_causal=is_causal,
        key_value_seq_lengths=lengths,
        local_window_size=window,
        implementation="cudnn",
    )
    return out[:, :num_queries]


def _is_odd(q: Any, k: Any) -> bool:
    return bool(q.shape[1] % 2 or k.shape[1] % 2)
