"""Attention for CPUs in plain JAX, whose scores stay in a core's cache: one example at a time, in blocks.

Forward, a block of queries takes all keys that it sees at once; backward, a block of keys all queries that see it, with
weights p = e^(s - lse) from the kept logsumexp (Dao et al., FlashAttention, arXiv:2205.14135, appendix B.2). Scores of
the backward pass are [keys, queries], so that no matmul needs them transposed. Blocks are unrolled, examples a loop.

Shape suffixes: H query heads, G key heads, R query heads of a key head, T queries, S keys, D features; t and s are
those of a block, N = R t its queries of all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .attention_masks import EMPTY, Band, Scores
from .chunked_attention import Segments

LEAST_BLOCK = 64
"""Queries or keys of a block, at least, if there are as many: enough for matmuls to be efficient."""

MOST_BLOCKS = 8
"""Blocks of queries or keys, at most: they are unrolled."""

LONGEST = 1024
"""Queries or keys; the scores of more are too large for a cache."""


def obstacle(q: Any, k: Any, *_: Any, **__: Any) -> str:
    """Why it can't run, or an empty text."""
    return "" if max(q.shape[1], k.shape[1]) <= LONGEST else f"at most {LONGEST:,} queries and keys"


def forward(
    scores: Scores, q_BTHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Attention [B, T, H, D] and the logsumexp of each query's scores [B, T, H]."""

    def one(q_THD: jax.Array, k_SGD: jax.Array, v_SGD: jax.Array, *segments: jax.Array) -> Any:
        example = _Example(scores, q_THD, k_SGD, segments)
        q_GRTD, k_GSD, v_GSD = example.queries(q_THD), _keys(k_SGD), _keys(v_SGD)
        parts = []
        for queries, keys in example.blocks_of_queries():
            score_GNs = example.products(_rows(q_GRTD, queries), k_GSD[:, keys]) * scores.scale
            seen = example.seen(queries, keys)
            if seen is not None:
                score_GNs = jnp.where(seen, score_GNs, -jnp.inf)
            most_GN1 = jnp.max(score_GNs, axis=-1, keepdims=True, initial=EMPTY)
            weight_GNs = jnp.exp(score_GNs - most_GN1)
            total_GN1 = jnp.sum(weight_GNs, axis=-1, keepdims=True)
            out_GND = example.einsum("gns,gsd->gnd", weight_GNs.astype(v_GSD.dtype), v_GSD[:, keys])
            is_seen = total_GN1 > 0
            total_GN1 = jnp.where(is_seen, total_GN1, 1)
            lse_GN1 = jnp.where(is_seen, most_GN1 + jnp.log(total_GN1), EMPTY)
            parts.append((example.apart(out_GND / total_GN1), example.apart(lse_GN1)))
        out_GRTD, lse_GRT1 = (jnp.concatenate(each, axis=2) for each in zip(*parts, strict=True))
        return example.results(out_GRTD).astype(q_THD.dtype), example.results(lse_GRT1)[..., 0]

    return _over_examples(one, q_BTHD, k_BSGD, v_BSGD, *segments)


def backward(
    scores: Scores,
    q_BTHD: jax.Array,
    k_BSGD: jax.Array,
    v_BSGD: jax.Array,
    segments: Segments,
    lse_BTH: jax.Array,
    dout_BTHD: jax.Array,
    delta_BTH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values; the arguments are those of `chunked_attention.backward`."""

    def one(
        q_THD: jax.Array,
        k_SGD: jax.Array,
        v_SGD: jax.Array,
        lse_TH: jax.Array,
        dout_THD: jax.Array,
        delta_TH: jax.Array,
        *segments: jax.Array,
    ) -> Any:
        example = _Example(scores, q_THD, k_SGD, segments)
        dtype = q_THD.dtype
        q_GRTD, dout_GRTD, lse_GRT1, delta_GRT1 = map(
            example.queries, (q_THD, dout_THD, lse_TH[..., None], delta_TH[..., None])
        )
        k_GSD, v_GSD = _keys(k_SGD), _keys(v_SGD)
        dq_GRTD, parts = jnp.zeros(q_GRTD.shape, example.wide), []
        for queries, keys in example.blocks_of_keys():
            q_GND, dout_GND, lse_GN1, delta_GN1 = (_rows(x, queries) for x in (q_GRTD, dout_GRTD, lse_GRT1, delta_GRT1))
            k_GsD, v_GsD = k_GSD[:, keys], v_GSD[:, keys]
            score_GsN = example.products(k_GsD, q_GND) * scores.scale
            weight_GsN = jnp.exp(score_GsN - jnp.swapaxes(lse_GN1, 1, 2))
            seen = example.seen(queries, keys)
            if seen is not None:
                weight_GsN = jnp.where(seen.T, weight_GsN, 0)
            dweight_GsN = example.products(v_GsD, dout_GND)
            dscore_GsN = weight_GsN * (dweight_GsN - jnp.swapaxes(delta_GN1, 1, 2)) * scores.scale
            weight_GsN, dscore_GsN = weight_GsN.astype(dtype), dscore_GsN.astype(dtype)
            dk_GsD = example.einsum("gsn,gnd->gsd", dscore_GsN, q_GND)
            dv_GsD = example.einsum("gsn,gnd->gsd", weight_GsN, dout_GND)
            parts.append((dk_GsD, dv_GsD))
            dq_GDN = example.einsum("gsd,gsn->gdn", k_GsD, dscore_GsN)
            of_queries = example.apart(jnp.swapaxes(dq_GDN, 1, 2))
            # Of all queries, the update would have no indices, at which XLA:CPU of JAX 0.11 crashes.
            is_whole = of_queries.shape == dq_GRTD.shape
            dq_GRTD = dq_GRTD + of_queries if is_whole else dq_GRTD.at[:, :, queries].add(of_queries)
        dk_GSD, dv_GSD = (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))
        dk_SGD, dv_SGD = (jnp.swapaxes(x, 0, 1).astype(k_SGD.dtype) for x in (dk_GSD, dv_GSD))
        return example.results(dq_GRTD).astype(dtype), dk_SGD, dv_SGD

    return _over_examples(one, q_BTHD, k_BSGD, v_BSGD, lse_BTH, dout_BTHD, delta_BTH, *segments)


class _Example:
    """The blocks of one example's attention."""

    def __init__(self, scores: Scores, q_THD: jax.Array, k_SGD: jax.Array, segments: Segments):
        self.band: Band = scores.band
        self.num_queries, self.num_keys, self.num_groups = q_THD.shape[0], k_SGD.shape[0], k_SGD.shape[1]
        self.heads_of_group = q_THD.shape[1] // self.num_groups
        self.wide = jnp.promote_types(q_THD.dtype, jnp.float32)
        self.segments = segments

    def blocks_of_queries(self) -> Iterator[tuple[slice, slice]]:
        """Each block of queries, and the keys that any of them sees."""
        before, after = self.band.before, self.band.after
        for queries in _blocks(self.num_queries):
            first = 0 if before is None else max(queries.start - before, 0)
            last = self.num_keys if after is None else min(queries.stop + after, self.num_keys)
            yield queries, slice(min(first, last), last)

    def blocks_of_keys(self) -> Iterator[tuple[slice, slice]]:
        """The queries that see any of a block of keys, and the block."""
        before, after = self.band.before, self.band.after
        for keys in _blocks(self.num_keys):
            first = 0 if after is None else max(keys.start - after, 0)
            last = self.num_queries if before is None else min(keys.stop + before, self.num_queries)
            yield slice(min(first, last), last), keys

    def queries(self, x_THx: jax.Array) -> jax.Array:
        """[T, H, ...] -> [G, R, T, ...]."""
        split = x_THx.reshape(x_THx.shape[0], self.num_groups, self.heads_of_group, *x_THx.shape[2:])
        return jnp.moveaxis(split, 0, 2)

    def results(self, x_GRTx: jax.Array) -> jax.Array:
        """[G, R, T, ...] -> [T, H, ...]."""
        x_TGRx = jnp.moveaxis(x_GRTx, 2, 0)
        return x_TGRx.reshape(x_TGRx.shape[0], -1, *x_TGRx.shape[3:])

    def apart(self, x_GNx: jax.Array) -> jax.Array:
        """[G, N, ...] -> [G, R, t, ...]."""
        return x_GNx.reshape(self.num_groups, self.heads_of_group, -1, *x_GNx.shape[2:])

    def einsum(self, text: str, *arrays: jax.Array) -> jax.Array:
        """Products that are added up in at least float32."""
        return jnp.einsum(text, *arrays, preferred_element_type=self.wide)

    def products(self, one_GmD: jax.Array, other_GnD: jax.Array) -> jax.Array:
        """[G, m, n]."""
        return self.einsum("gmd,gnd->gmn", one_GmD, other_GnD)

    def seen(self, queries: slice, keys: slice) -> jax.Array | None:
        """Whether a query sees a key, [N, s]; None if all do."""
        query_t1, key_1s = (jnp.arange(x.start, x.stop) for x in (queries, keys))
        query_t1, key_1s = query_t1[:, None], key_1s[None, :]
        mask = self.band.sees(query_t1, key_1s)
        if self.segments:
            of_queries, of_keys = self.segments
            same = of_queries[queries][:, None] == of_keys[keys][None, :]
            mask = same if mask is None else mask & same
        return None if mask is None else jnp.tile(mask, (self.heads_of_group, 1))


def _blocks(length: int) -> Iterator[slice]:
    size = max(LEAST_BLOCK, -(-length // MOST_BLOCKS))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _keys(x_SGD: jax.Array) -> jax.Array:
    return jnp.swapaxes(x_SGD, 0, 1)


def _rows(x_GRTx: jax.Array, queries: slice) -> jax.Array:
    """[G, R, T, ...] -> [G, N, ...]."""
    x_GRtx = x_GRTx[:, :, queries]
    return x_GRtx.reshape(x_GRtx.shape[0], -1, *x_GRtx.shape[3:])


def _over_examples(one: Callable[..., Any], *arrays_B: jax.Array) -> Any:
    return jax.lax.scan(lambda _, arrays: (None, one(*arrays)), None, arrays_B)[1]
