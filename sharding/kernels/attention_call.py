"""Blockwise attention as an op on each device's shards, with a derivative that keeps the logsumexp of each query.

Batch and heads can be sharded, queries too if their positions don't matter, and the query heads of a key head, whose
gradients of keys and values are then summed. Kept for the backward pass are the operands, the result and the statistics
[B, T, H] in float32.

With p the weights, the gradient of a score is p * (dout . v - sum(out * dout) + dlse), where dlse is the cotangent of
its query's logsumexp.

Shape suffixes: B batch, H query heads, G key heads, T queries, S keys, D features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import cached_attention, chunked_attention, tpu_attention
from .attention_masks import Scores
from .chunked_attention import Segments
from .saved_names import saved
from .with_rule import with_rule

MODULES: dict[str, Any] = {
    "xla_cached": cached_attention,
    "xla_chunked": chunked_attention,
    "mosaic_tpu": tpu_attention,
}
"""Implementation -> the module of its `forward` and `backward`."""

QUERIES, KEYS, STATISTICS = "b t (g r) d", "b s g d", "b t (g r)"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    implementation: str, scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Attention [B, T, H, D] and the logsumexp of each query's scores [B, T, H]."""
    return _on_shards(implementation, scores, bool(segments))(q, k, v, *segments)


@functools.cache
def _on_shards(implementation: str, scores: Scores, has_segments: bool) -> Callable[..., Any]:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> tuple[jax.Array, jax.Array]:
        return MODULES[implementation].forward(scores, q, k, v, segments)

    return with_rule(
        attention, f"{_operands(has_segments)} -> {QUERIES}, {STATISTICS}", need_replication=_whole(scores)
    )


def _keep(
    implementation: str, scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    found: tuple[jax.Array, jax.Array] = attend(implementation, scores, q, k, v, segments)
    out, lse = saved(found[0], "attention_output"), saved(found[1], "attention_logsumexp")
    return (out, lse), (q, k, v, segments, out, lse)


def _gradients(implementation: str, scores: Scores, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, segments, out, lse = kept
    dout, dlse = cotangents
    run = _gradients_on_shards(implementation, scores, bool(segments))
    return *run(q, k, v, *segments, out, dout, lse, dlse), None


@functools.cache
def _gradients_on_shards(implementation: str, scores: Scores, has_segments: bool) -> Callable[..., Any]:
    def attention_gradients(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v, *segments, out, dout, lse, dlse = arrays
        delta_BTH = jnp.sum(out.astype(lse.dtype) * dout.astype(lse.dtype), axis=-1) - dlse
        return MODULES[implementation].backward(scores, q, k, v, tuple(segments), lse, dout, delta_BTH)

    more = f"{QUERIES}, {QUERIES}, {STATISTICS}, {STATISTICS}"
    whole = _whole(scores)
    return with_rule(
        attention_gradients,
        f"{_operands(has_segments)}, {more} -> {QUERIES}, {KEYS}, {KEYS}",
        reduction=[n for n in ("t", "r") if n not in whole],
        need_replication=whole,
    )


attend.defvjp(_keep, _gradients)


def _operands(has_segments: bool) -> str:
    return ", ".join([QUERIES, KEYS, KEYS, *(["b t", "b s"] if has_segments else [])])


def _whole(scores: Scores) -> list[str]:
    """Factors that each device needs whole: queries only where a band makes their positions matter."""
    return ["t", "s", "d"] if scores.band.is_bounded else ["s", "d"]
