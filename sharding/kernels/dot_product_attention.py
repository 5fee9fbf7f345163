"""Softmax attention: `softmax(scale * q k^T) v` per head, with memory linear in length where a kernel or blocks run it.

Vaswani et al., Attention Is All You Need, arXiv:1706.03762, section 3.2; grouped queries as in Ainslie et al., GQA,
arXiv:2305.13245; the logsumexp as in Dao, FlashAttention-2, arXiv:2307.08691, section 3.1.

Shape suffixes: B batch, H query heads, G key heads, R query heads of a key head, T queries, S keys, D features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from ..errors import ShardingError, raise_together
from ..mesh import platform
from . import attention_by_cudnn, cached_attention, tpu_attention
from .attention_call import attend
from .attention_masks import EMPTY, Band, Scores, Window
from .chunked_attention import Segments
from .implementation import XLA, Candidate, choose

CACHED, CHUNKED = "xla_cached", "xla_chunked"

IMPLEMENTATIONS = (
    Candidate(
        name="mosaic_tpu",
        platforms=frozenset({"tpu"}),
        obstacle=tpu_attention.obstacle,
        why="scores stay in VMEM, blocks that are masked are skipped",
    ),
    Candidate(
        name="cudnn",
        platforms=frozenset({"gpu"}),
        obstacle=attention_by_cudnn.obstacle,
        why="the fastest of JAX on Hopper GPUs",
    ),
    Candidate(
        name=CACHED,
        platforms=frozenset(),
        obstacle=cached_attention.obstacle,
        why="scores stay in a core's cache, blocks that are masked are skipped; on CPUs from 256 to 1,024 tokens",
    ),
    Candidate(
        name=CHUNKED,
        platforms=frozenset({"tpu", "gpu"}),
        obstacle=lambda *_, **__: "",
        why="memory linear in length, in plain JAX; on CPUs from 1,025 tokens on",
    ),
)

SegmentIds = jax.Array | tuple[jax.Array, jax.Array] | None
"""Segment of each position [B, T], or of each query [B, T] and key [B, S]."""


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = ...,
    window: Window = ...,
    segment_ids: SegmentIds = ...,
    scale: float | None = ...,
    return_stats: Literal[False] = ...,
    implementation: str = ...,
) -> jax.Array: ...


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = ...,
    window: Window = ...,
    segment_ids: SegmentIds = ...,
    scale: float | None = ...,
    return_stats: Literal[True],
    implementation: str = ...,
) -> tuple[jax.Array, jax.Array]: ...


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: Window = None,
    segment_ids: SegmentIds = None,
    scale: float | None = None,
    return_stats: bool = False,
    implementation: str = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention of queries to keys and values, with the softmax in float32.

    Positions count from the first query and the first key, also if there are more of one than of the other, as in
    `jax.nn.dot_product_attention`. A query that sees no key gets zeros.

    Args:
        q: queries [B, T, H, D].
        k: keys [B, S, G, D], where H is a multiple of G: head h attends to key head `h // (H / G)`.
        v: values [B, S, G, D].
        causal: whether a query sees only keys at its own position and before.
        window: (before, after): how many keys before and after its own position a query sees; a number is both.
        segment_ids: integers [B, T] of packed sequences, or a pair for queries [B, T] and keys [B, S]: a query sees
            keys of its own segment only.
        scale: of the scores; by default `1 / sqrt(D)`.
        return_stats: whether to return the logsumexp of each query's scores too. Attention to parts of the keys
            combines with weights `exp(logsumexp of the part - logsumexp of all)`. It has a gradient.
        implementation: `"xla"`: all scores at once, in plain JAX. `"xla_chunked"`: block by block, in plain JAX.
            `"xla_cached"`: in plain JAX, one example at a time, for the caches of CPUs. `"mosaic_tpu"`: a Pallas
            kernel. `"cudnn"`: cuDNN's, for 16-bit arrays on GPUs, without segments or statistics. `"auto"`: the first
            that can run of, on TPUs, the Pallas kernel and `"xla_chunked"`, on GPUs, cuDNN and `"xla_chunked"`, and on
            CPUs `"xla"`, or, from 256 x 256 scores of a head on, `"xla_cached"` and `"xla_chunked"`.

    Returns:
        [B, T, H, D] in the dtype of `q`; with `return_stats`, also the logsumexp [B, T, H] in float32, -1e30 for a
        query that sees no key.

    Raises:
        ShardingError: shapes, dtypes or options that don't fit; an implementation that is unknown or can't run.

    Example:
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> q, k = jnp.ones((1, 4, 8, 16)), jnp.ones((1, 4, 2, 16))
        >>> kernels.attention(q, k, k, causal=True).shape
        (1, 4, 8, 16)
    """
    _check(q, k, v, window, segment_ids)
    scores = Scores(scale=q.shape[-1] ** -0.5 if scale is None else float(scale), band=Band.of(causal, window))
    segments = _segments(segment_ids)
    asked = _on_cpu(q, k) if implementation == "auto" and platform() == "cpu" else implementation
    options = {"scores": scores, "segments": segments, "return_stats": return_stats}
    chosen = choose("attention", IMPLEMENTATIONS, asked, q, k, v, **options)
    if chosen == "cudnn":
        return attention_by_cudnn.attend(scores, q, k, v)
    is_empty = not math.prod(q.shape) or not math.prod(k.shape)
    run = reference if chosen == XLA or is_empty else functools.partial(attend, chosen)
    found: tuple[jax.Array, jax.Array] = run(scores, q, k, v, segments)
    return found if return_stats else found[0]


def reference(
    scores: Scores, q_BTHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Attention and logsumexp in plain JAX, with all scores at once."""
    wide = jnp.promote_types(q_BTHD.dtype, jnp.float32)
    B, T, H, D = q_BTHD.shape
    S, G = k_BSGD.shape[1:3]
    q_BTGRD = q_BTHD.reshape(B, T, G, H // G, D)
    score_BGRTS = jnp.einsum("btgrd,bsgd->bgrts", q_BTGRD, k_BSGD, preferred_element_type=wide) * scores.scale
    seen = scores.band.sees(jnp.arange(T)[:, None], jnp.arange(S)[None, :])
    if seen is not None:
        score_BGRTS = jnp.where(seen[None, None, None], score_BGRTS, -jnp.inf)
    if segments:
        same_BTS = segments[0][:, :, None] == segments[1][:, None, :]
        score_BGRTS = jnp.where(same_BTS[:, None, None], score_BGRTS, -jnp.inf)
    most = jax.lax.stop_gradient(score_BGRTS.max(-1, keepdims=True, initial=EMPTY))
    weight_BGRTS = jnp.exp(score_BGRTS - most)
    total = weight_BGRTS.sum(-1, keepdims=True)
    is_seen = total > 0
    total = jnp.where(is_seen, total, 1)
    lse_BGRT = jnp.where(is_seen, most + jnp.log(total), EMPTY)[..., 0]
    weight_BGRTS = (weight_BGRTS / total).astype(v_BSGD.dtype)
    out_BTGRD = jnp.einsum("bgrts,bsgd->btgrd", weight_BGRTS, v_BSGD, preferred_element_type=wide)
    out_BTHD = out_BTGRD.reshape(B, T, H, D).astype(q_BTHD.dtype)
    return out_BTHD, jnp.moveaxis(lse_BGRT, 3, 1).reshape(B, T, H)


BLOCKS_FROM = 256 * 256
"""Scores of a head from which blocks are faster on CPUs."""


def takes_blocks(q: Any, k: Any, implementation: str = "auto") -> bool:
    """Whether `attention` of such queries and keys never has all scores at once, on the current mesh's platform.

    Example:
        >>> import jax
        >>> from sharding import kernels
        >>> short, long = (jax.ShapeDtypeStruct((1, length, 8, 16), "float32") for length in (64, 256))
        >>> kernels.takes_blocks(short, short), kernels.takes_blocks(long, long)
        (False, True)
    """
    if implementation == "auto" and platform() == "cpu":
        return _on_cpu(q, k) != XLA
    return implementation != XLA


def _on_cpu(q: Any, k: Any) -> str:
    if q.shape[1] * k.shape[1] < BLOCKS_FROM:
        return XLA
    return CHUNKED if cached_attention.obstacle(q, k) else CACHED


def _segments(segment_ids: SegmentIds) -> Segments:
    if segment_ids is None:
        return ()
    of_queries, of_keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    return of_queries, of_keys


def _check(q: Any, k: Any, v: Any, window: Any, segment_ids: Any) -> None:
    asked = "kernels.attention(q, k, v)"
    raise_together(asked, list(_array_errors(asked, q, k, v)))
    raise_together(asked, [*_window_errors(asked, window), *_segment_errors(asked, q, k, segment_ids)])


def _array_errors(asked: str, q: Any, k: Any, v: Any) -> Iterator[ShardingError]:
    found = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    if not q.ndim == k.ndim == v.ndim == 4:
        yield ShardingError(asked, found=found, required="4 dims: [batch, length, heads, features]")
        return
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        required = "keys and values of one shape, with the batch and features of the queries"
        yield ShardingError(asked, found=found, required=required)
    elif not k.shape[2] or q.shape[2] % k.shape[2] or not q.shape[3]:
        yield ShardingError(asked, found=found, required="query heads that are a multiple of key heads, and a feature")
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        yield ShardingError(asked, found=found, required="one floating-point dtype")


def _window_errors(asked: str, window: Any) -> Iterator[ShardingError]:
    sizes = window if isinstance(window, tuple) else (window, window)
    if window is not None and not (len(sizes) == 2 and all(isinstance(n, int) and n >= 0 for n in sizes)):
        required = "a number of keys, or a pair of those before and after a query"
        yield ShardingError(f"{asked}: window", found=repr(window), required=required)


def _segment_errors(asked: str, q: Any, k: Any, segment_ids: Any) -> Iterator[ShardingError]:
    if segment_ids is None:
        return
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    shapes = [q.shape[:2], k.shape[:2]]
    fits = len(pair) == 2 and all(x.shape == shape for x, shape in zip(pair, shapes, strict=True))
    if not fits or not all(jnp.issubdtype(x.dtype, jnp.integer) for x in pair):
        yield ShardingError(
            f"{asked}: segment_ids",
            found=", ".join(f"{x.dtype}{list(x.shape)}" for x in pair),
            required=f"integers {list(shapes[0])} for queries and {list(shapes[1])} for keys",
            fix="a pair, segment_ids=(of_queries, of_keys)" if shapes[0] != shapes[1] else (),
        )
