"""Attention in plain JAX with memory linear in length: one block of scores at a time, forward and backward.

A scan over the blocks that the band leaves updates each query's running maximum m, sum l and weighted values o:
m' = max(m, max s), l' = e^(m - m') l + sum e^(s - m'), o' = e^(m - m') o + e^(s - m') v. The backward scan computes a
block's weights again from its logsumexp, p = e^(s - lse), and adds to all three gradients.

Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, arXiv:2112.05682, sections 2 and 3, with blocks of queries
and keys; the backward pass is that of Dao et al., FlashAttention, arXiv:2205.14135, appendix B.2, instead of
checkpointed blocks.

Shape suffixes: B batch, H query heads, G key heads, R query heads of a key head, T queries, S keys, D features; t and s
are those of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh import platform
from .attention_masks import EMPTY, Block, Blocks, Scores

BLOCK = (512, 512)
"""Queries and keys of a block, at most."""

CPU_BLOCK = (256, 256)
"""On CPUs, where the block of a head then fits in the caches of a core."""

Segments = tuple[jax.Array, ...]
"""Segment of each query [B, T] and key [B, S]; or nothing."""


def forward(
    scores: Scores, q_BTHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Attention [B, T, H, D] and the logsumexp of each query's scores [B, T, H]."""
    work = _Work(scores, q_BTHD, k_BSGD, segments)
    q_BGRTD, (k_BGSD, v_BGSD) = work.queries(q_BTHD), map(work.keys, (k_BSGD, v_BSGD))
    wide = work.wide
    state = (
        jnp.full(q_BGRTD.shape[:-1], EMPTY, wide),
        jnp.zeros(q_BGRTD.shape[:-1], wide),
        jnp.zeros(q_BGRTD.shape, wide),
    )

    def update(state: Any, block: _At) -> Any:
        most, total, out = (block.queries(x) for x in state)
        v_BGsD = block.keys(v_BGSD)
        score_BGRts = block.scores(q_BGRTD, k_BGSD)
        next_most = jnp.maximum(most, score_BGRts.max(-1))
        weight_BGRts = jnp.exp(score_BGRts - next_most[..., None])
        keep = jnp.exp(most - next_most)
        added = work.einsum("bgrts,bgsd->bgrtd", weight_BGRts.astype(v_BGsD.dtype), v_BGsD)
        updated = next_most, keep * total + weight_BGRts.sum(-1), keep[..., None] * out + added
        return tuple(block.put_queries(x, y) for x, y in zip(state, updated, strict=True))

    most, total, out = work.over_blocks(update, state)
    seen = total > 0
    total = jnp.where(seen, total, 1)
    lse_BGRT = jnp.where(seen, most + jnp.log(total), EMPTY)
    return work.results(out / total[..., None]).astype(q_BTHD.dtype), work.results(lse_BGRT)


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
    """Gradients of queries, keys and values.

    Args:
        scores: as forward, and so are the arrays up to the segments.
        q_BTHD: queries.
        k_BSGD: keys.
        v_BSGD: values.
        segments: of queries and keys.
        lse_BTH: logsumexp of each query's scores.
        dout_BTHD: the cotangent of the result.
        delta_BTH: `sum(out * dout)` minus the cotangent of the logsumexp: ds = p * (dout . v - delta).
    """
    work = _Work(scores, q_BTHD, k_BSGD, segments)
    q_BGRTD, dout_BGRTD, lse_BGRT, delta_BGRT = map(work.queries, (q_BTHD, dout_BTHD, lse_BTH, delta_BTH))
    k_BGSD, v_BGSD = map(work.keys, (k_BSGD, v_BSGD))
    state = tuple(jnp.zeros(x.shape, work.wide) for x in (q_BGRTD, k_BGSD, v_BGSD))

    def update(state: Any, block: _At) -> Any:
        q_BGRtD, dout_BGRtD = block.queries(q_BGRTD), block.queries(dout_BGRTD)
        k_BGsD, v_BGsD = block.keys(k_BGSD), block.keys(v_BGSD)
        weight_BGRts = jnp.exp(block.scores(q_BGRTD, k_BGSD) - block.queries(lse_BGRT)[..., None])
        dweight_BGRts = work.einsum("bgrtd,bgsd->bgrts", dout_BGRtD, v_BGsD)
        dscore_BGRts = weight_BGRts * (dweight_BGRts - block.queries(delta_BGRT)[..., None]) * scores.scale
        weight_BGRts, dscore_BGRts = weight_BGRts.astype(q_BTHD.dtype), dscore_BGRts.astype(q_BTHD.dtype)
        dq, dk, dv = state
        dq_BGRtD = work.einsum("bgrts,bgsd->bgrtd", dscore_BGRts, k_BGsD)
        dk_BGsD = work.einsum("bgrts,bgrtd->bgsd", dscore_BGRts, q_BGRtD)
        dv_BGsD = work.einsum("bgrts,bgrtd->bgsd", weight_BGRts, dout_BGRtD)
        return (
            block.put_queries(dq, block.queries(dq) + dq_BGRtD),
            block.put_keys(dk, block.keys(dk) + dk_BGsD),
            block.put_keys(dv, block.keys(dv) + dv_BGsD),
        )

    dq, dk, dv = work.over_blocks(update, state)
    dk, dv = (jnp.moveaxis(x[:, :, : k_BSGD.shape[1]], 1, 2).astype(k_BSGD.dtype) for x in (dk, dv))
    return work.results(dq).astype(q_BTHD.dtype), dk, dv


class _Work:
    """The blocks of an attention, and its arrays with heads in front of positions, padded to whole blocks."""

    def __init__(self, scores: Scores, q_BTHD: jax.Array, k_BSGD: jax.Array, segments: Segments):
        self.scores = scores
        self.num_groups = k_BSGD.shape[2]
        self.blocks = Blocks.of(q_BTHD.shape[1], k_BSGD.shape[1], CPU_BLOCK if platform() == "cpu" else BLOCK)
        self.wide = jnp.promote_types(q_BTHD.dtype, jnp.float32)
        paddings = (self.blocks.query_padding, self.blocks.key_padding)
        self.segments = [jnp.pad(x, [(0, 0), (0, n)]) for x, n in zip(segments, paddings, strict=False)]

    def queries(self, x_BTHx: jax.Array) -> jax.Array:
        """[B, T, H, ...] -> [B, G, R, T, ...]."""
        x_BTHx = _padded(x_BTHx, self.blocks.query_padding)
        return jnp.moveaxis(x_BTHx.reshape(*x_BTHx.shape[:2], self.num_groups, -1, *x_BTHx.shape[3:]), 1, 3)

    def keys(self, x_BSGD: jax.Array) -> jax.Array:
        """[B, S, G, D] -> [B, G, S, D]."""
        return jnp.moveaxis(_padded(x_BSGD, self.blocks.key_padding), 1, 2)

    def results(self, x_BGRTx: jax.Array) -> jax.Array:
        """[B, G, R, T, ...] -> [B, T, H, ...], without padding."""
        x_BTGRx = jnp.moveaxis(x_BGRTx, 3, 1)[:, : self.blocks.num_queries]
        return x_BTGRx.reshape(*x_BTGRx.shape[:2], -1, *x_BTGRx.shape[4:])

    def einsum(self, text: str, *arrays: jax.Array) -> jax.Array:
        """Products that are added up in at least float32."""
        return jnp.einsum(text, *arrays, preferred_element_type=self.wide)

    def over_blocks(self, update: Callable[[Any, _At], Any], state: Any) -> Any:
        """Updates a state for each visited block: first for those without a mask."""
        visited = self.blocks.visited(self.scores.band)
        for is_partial in (False, True):
            group = [block for block in visited if block.is_partial == is_partial]
            if group:
                state = self._scanned(update, state, group, is_partial)
        return state

    def _scanned(self, update: Any, state: Any, group: Sequence[Block], is_partial: bool) -> Any:
        starts = np.array([(b.query * self.blocks.query_block, b.key * self.blocks.key_block) for b in group], "int32")

        def step(state: Any, start: jax.Array) -> tuple[Any, None]:
            return update(state, _At(self, start[0], start[1], is_partial)), None

        return jax.lax.scan(step, state, jnp.asarray(starts))[0]


class _At:
    """A block inside the scan."""

    def __init__(self, work: _Work, first_query: jax.Array, first_key: jax.Array, is_partial: bool):
        self.work, self.first_query, self.first_key, self.is_partial = work, first_query, first_key, is_partial

    def queries(self, x_BGRTx: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x_BGRTx, self.first_query, self.work.blocks.query_block, 3)

    def keys(self, x_BGSD: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x_BGSD, self.first_key, self.work.blocks.key_block, 2)

    def put_queries(self, x_BGRTx: jax.Array, x_BGRtx: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x_BGRTx, x_BGRtx, self.first_query, 3)

    def put_keys(self, x_BGSD: jax.Array, x_BGsD: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x_BGSD, x_BGsD, self.first_key, 2)

    def scores(self, q_BGRTD: jax.Array, k_BGSD: jax.Array) -> jax.Array:
        """Scores of the block; -inf where masked."""
        score = self.work.einsum("bgrtd,bgsd->bgrts", self.queries(q_BGRTD), self.keys(k_BGSD))
        mask = self._mask()
        score = score * self.work.scores.scale
        return score if mask is None else jnp.where(mask, score, -jnp.inf)

    def _mask(self) -> jax.Array | None:
        """Whether a query sees a key, [B or 1, 1, 1, t, s]."""
        blocks, mask = self.work.blocks, None
        if self.is_partial:
            query = self.first_query + jax.lax.broadcasted_iota(jnp.int32, (blocks.query_block, blocks.key_block), 0)
            key = self.first_key + jax.lax.broadcasted_iota(jnp.int32, (blocks.query_block, blocks.key_block), 1)
            seen = blocks.sees(self.work.scores.band, query, key)
            mask = None if seen is None else seen[None, None, None]
        if self.work.segments:
            of_queries, of_keys = self.work.segments
            of_queries = jax.lax.dynamic_slice_in_dim(of_queries, self.first_query, blocks.query_block, 1)
            of_keys = jax.lax.dynamic_slice_in_dim(of_keys, self.first_key, blocks.key_block, 1)
            same = (of_queries[:, :, None] == of_keys[:, None, :])[:, None, None]
            mask = same if mask is None else mask & same
        return mask


def _padded(x: jax.Array, count: int) -> jax.Array:
    """With zeros at the end of its positions, the second dim."""
    return jnp.pad(x, [(0, 0), (0, count), *[(0, 0)] * (x.ndim - 2)]) if count else x
