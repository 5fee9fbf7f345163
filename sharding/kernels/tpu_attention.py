"""Attention as Pallas TPU kernels, one forward and one backward, with the passes of `chunked_attention`.

A program has one block of scores, of those that the band leaves; their list is prefetched to scalar memory. Scores are
computed transposed, keys by queries, so that the statistics of queries lie along lanes: in HBM they take 4 bytes a
query and head, as rows [1, T], not the 512 of a column padded to 128 lanes; their maxima and sums are those of
sublanes; and each mask is written once for both passes. What a kernel accumulates for queries it keeps as [D, T].

The backward kernel visits blocks by keys, whose gradients are accumulated in VMEM until the next keys; those of queries
stay in VMEM throughout. More queries than fit there run in parts, which go on adding to the gradients of keys and
values in place; so do more query heads of a key head, whose sums are added in the end.

Shape suffixes: B batch, H query heads, G key heads, R query heads of a key head, T queries, S keys, D features; t and s
are those of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .attention_masks import EMPTY, Block, Blocks, Scores
from .chunked_attention import Segments
from .implementation import backend, tpu_kernel, unsupported
from .tpu_attention_blocks import (
    FIRST,
    LANES,
    LAST,
    Specs,
    Table,
    block_scores,
    by_mask,
    heads_first,
    kernel_cost,
    positions_first,
    product,
    segment_rows,
)

FORWARD_BLOCK = (512, 1024)
"""Queries and keys of a block, at most."""

BACKWARD_BLOCK = (512, 512)
"""Also; half of each for heads of more than 128 features."""

QUERY_GRADIENT_BYTES = 5 * 2**20
"""Of what VMEM has of the gradients of queries; the blocks of a program take most of the rest of its 16 MB."""

MOST_PARTS = 16
"""Kernels of a backward pass, each of which takes about a second to compile; more only for the longest sequences."""

MOST_FEATURES = 256


def obstacle(q: Any, *_: Any, **__: Any) -> str:
    """Why the kernels can't run an attention, or an empty text."""
    if missing := unsupported("mosaic_tpu"):
        return missing
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return "float32 or bfloat16"
    return f"at most {MOST_FEATURES} features" if q.shape[3] > MOST_FEATURES else ""


def forward(
    scores: Scores, q_BTHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Attention [B, T, H, D] and the logsumexp of each query's scores [B, T, H]."""
    B, T, H, D = q_BTHD.shape
    R = H // k_BSGD.shape[2]
    blocks = Blocks.of(T, k_BSGD.shape[1], FORWARD_BLOCK, LANES)
    q_BHTD = heads_first(q_BTHD, blocks.query_padding)
    k_BGSD, v_BGSD = (heads_first(x, blocks.key_padding) for x in (k_BSGD, v_BSGD))
    visited = blocks.visited(scores.band)
    unseeing = {*range(q_BHTD.shape[2] // blocks.query_block)} - {block.query for block in visited}
    visited += [Block(query, 0, is_partial=True) for query in sorted(unseeing)]  # whose results are written, too
    table = Table.of(visited, lambda block: block.query)

    def kernel(table_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
        *segment_refs, out_ref, lse_ref, most_ref, total_ref, out_Dt_ref = refs
        i = pl.program_id(2)
        at, flags = (table.query(table_ref, i), table.key(table_ref, i)), table.flags(table_ref, i)

        @pl.when(flags & FIRST != 0)
        def _() -> None:
            most_ref[...] = jnp.full_like(most_ref, EMPTY)
            total_ref[...] = jnp.zeros_like(total_ref)
            out_Dt_ref[...] = jnp.zeros_like(out_Dt_ref)

        def update(is_partial: bool) -> None:
            most, v_sD = most_ref[...], v_ref[...]
            score_st = block_scores(scores, blocks, at, q_ref[...], k_ref[...], segment_refs, is_partial)
            next_most = jnp.maximum(most, score_st.max(0, keepdims=True))
            weight_st = jnp.exp(score_st - next_most)
            keep = jnp.exp(most - next_most)
            most_ref[...] = next_most
            total_ref[...] = keep * total_ref[...] + weight_st.sum(0, keepdims=True)
            out_Dt_ref[...] = keep * out_Dt_ref[...] + product(v_sD, weight_st.astype(v_sD.dtype), 0, 0)

        by_mask(flags, update)

        @pl.when(flags & LAST != 0)
        def _() -> None:
            is_seen = total_ref[...] > 0
            total = jnp.where(is_seen, total_ref[...], 1)
            out_ref[...] = (out_Dt_ref[...] / total).T.astype(out_ref.dtype)
            lse_ref[...] = jnp.where(is_seen, most_ref[...] + jnp.log(total), EMPTY)

    specs = Specs.of(table, blocks, D, lambda b, h, i: (b, h, h // R, i))
    scratch = ((1, blocks.query_block), (1, blocks.query_block), (D, blocks.query_block))
    out_BHTD, lse_BH1T = tpu_kernel(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, H, table.count),
            in_specs=[specs.queries, specs.keys, specs.keys, *specs.segments[: len(segments)]],
            out_specs=[specs.queries, specs.statistics],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_BHTD.shape, q_BHTD.dtype),
            jax.ShapeDtypeStruct((B, H, 1, q_BHTD.shape[2]), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=kernel_cost(
            products=2,
            programs=B * H * table.count,
            blocks=blocks,
            arrays=(q_BHTD, q_BHTD),
            read_rows=2 * blocks.key_block,
        ),
        interpret=backend("mosaic_tpu").interpret,
        name="attention",
    )(table.array(), q_BHTD, k_BGSD, v_BGSD, *segment_rows(segments, blocks))
    return positions_first(out_BHTD, T), positions_first(lse_BH1T.mT, T)[..., 0]


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
    B, T, H, D = q_BTHD.shape
    G = k_BSGD.shape[2]
    halves = 1 if D <= LANES else 2
    blocks = Blocks.of(T, k_BSGD.shape[1], (BACKWARD_BLOCK[0] // halves, BACKWARD_BLOCK[1] // halves), LANES)
    q_BHTD, dout_BHTD = (heads_first(x, blocks.query_padding) for x in (q_BTHD, dout_BTHD))
    k_BGSD, v_BGSD = (heads_first(x, blocks.key_padding) for x in (k_BSGD, v_BSGD))
    lse_BH1T, delta_BH1T = (heads_first(x[..., None], blocks.query_padding).mT for x in (lse_BTH, delta_BTH))
    operands = (q_BHTD, k_BGSD, v_BGSD, dout_BHTD, lse_BH1T, delta_BH1T, *segment_rows(segments, blocks))
    count = q_BHTD.shape[2] // blocks.query_block
    block_bytes = blocks.query_block * _up(D, LANES) * (4 + 2 * q_BTHD.dtype.itemsize)  # accumulated, and as a result
    heads, at_once = _resident(H // G, count, block_bytes)
    parts, sums = [], ()
    for first in range(0, count, at_once):
        dq, *sums = _part(scores, blocks, range(first, min(first + at_once, count)), heads, operands, tuple(sums))
        parts.append(dq)
    dq_BHTD = jnp.concatenate(parts, axis=2)
    dk_BGSD, dv_BGSD = (x.reshape(B, G, -1, *x.shape[2:]).sum(2).astype(k_BSGD.dtype) for x in sums)
    S = k_BSGD.shape[1]
    return positions_first(dq_BHTD, T), positions_first(dk_BGSD, S), positions_first(dv_BGSD, S)


def _resident(num_heads: int, count: int, block_bytes: int) -> tuple[int, int]:
    """How many query heads of a key head, and how many of their blocks of queries, have their gradients in VMEM.

    As many heads as leave at most `MOST_PARTS` parts, as each of several sums of a key head's takes memory.
    """
    for heads in sorted((n for n in range(1, num_heads + 1) if num_heads % n == 0), reverse=True):
        at_once = QUERY_GRADIENT_BYTES // (heads * block_bytes)
        if at_once and count <= MOST_PARTS * at_once:
            return heads, at_once
    return 1, max(1, QUERY_GRADIENT_BYTES // block_bytes)


def _part(
    scores: Scores,
    blocks: Blocks,
    part: range,
    R: int,
    operands: Sequence[jax.Array],
    sums: tuple[jax.Array, ...],
) -> Sequence[jax.Array]:
    """Gradients [B, H, T of the part, D] of some blocks of queries, and sums with those of keys and values.

    Args:
        scores: of the attention.
        blocks: of scores.
        part: the blocks of queries.
        R: query heads of a sum: some of a key head's.
        operands: queries, keys, values, cotangents, statistics, and segments.
        sums: those of earlier parts, [B, H / R, S, D] in float32.
    """
    q_BHTD, k_BGSD = operands[:2]
    B, H, _, D = q_BHTD.shape
    per_key_head = H // R // k_BGSD.shape[1]
    t, num_queries = blocks.query_block, len(part) * blocks.query_block
    visited = [block for block in blocks.visited(scores.band) if block.query in part]
    unseen = {*range(k_BGSD.shape[2] // blocks.key_block)} - {block.key for block in visited}
    visited += [Block(part[0], key, is_partial=True) for key in unseen]  # whose gradients are written, too
    table = Table.of(sorted(visited, key=lambda block: (block.key, block.query)), lambda block: block.key)

    def kernel(table_ref: Any, *refs: Any) -> None:
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *segment_refs = refs[: len(operands)]
        *sum_refs, dq_ref, dk_ref, dv_ref, dq_RDT_ref, dk_sD_ref, dv_sD_ref = refs[len(operands) :]
        i, head = pl.program_id(2), pl.program_id(3)
        at, flags = (table.query(table_ref, i), table.key(table_ref, i)), table.flags(table_ref, i)

        @pl.when((i == 0) & (head == 0))
        def _() -> None:
            dq_RDT_ref[...] = jnp.zeros_like(dq_RDT_ref)

        @pl.when((flags & FIRST != 0) & (head == 0))
        def _() -> None:
            for n, ref in enumerate((dk_sD_ref, dv_sD_ref)):
                ref[...] = sum_refs[n][...] if sum_refs else jnp.zeros_like(ref)

        def update(is_partial: bool) -> None:
            q_tD, k_sD, dout_tD = q_ref[...], k_ref[...], dout_ref[...]
            score_st = block_scores(scores, blocks, at, q_tD, k_sD, segment_refs, is_partial)
            weight_st = jnp.exp(score_st - lse_ref[...])
            dweight_st = product(v_ref[...], dout_tD, 1, 1)
            dscore_st = (weight_st * (dweight_st - delta_ref[...]) * scores.scale).astype(q_tD.dtype)
            dv_sD_ref[...] += product(weight_st.astype(dout_tD.dtype), dout_tD, 1, 0)
            dk_sD_ref[...] += product(dscore_st, q_tD, 1, 0)
            mine = pl.ds(pl.multiple_of((at[0] - part[0]) * t, t), t)
            dq_RDT_ref[head, :, mine] += product(k_sD, dscore_st, 0, 0)

        by_mask(flags, update)

        @pl.when((flags & LAST != 0) & (head == R - 1))
        def _() -> None:
            dk_ref[...] = dk_sD_ref[...]
            dv_ref[...] = dv_sD_ref[...]

        @pl.when(i == table.count - 1)
        def _() -> None:
            dq_ref[head] = dq_RDT_ref[head].T.astype(dq_ref.dtype)

    specs = Specs.of(table, blocks, D, lambda b, g, i, r: (b, g * R + r, g // per_key_head, i))
    of_sums = Specs.of(table, blocks, D, lambda b, g, i, r: (b, g * R + r, g, i)).keys
    of_operands = [specs.queries, specs.keys, specs.keys, specs.queries, specs.statistics, specs.statistics]
    of_operands += specs.segments[: len(operands) - len(of_operands)]
    all_queries = pl.BlockSpec((None, R, num_queries, D), lambda b, g, i, r, ref: (b, g, 0, 0))
    scratch = ((R, D, num_queries), (blocks.key_block, D), (blocks.key_block, D))
    total = jax.ShapeDtypeStruct((B, H // R, *k_BGSD.shape[2:]), jnp.float32)
    aliases = {1 + len(operands) + i: 1 + i for i in range(len(sums))}
    return tpu_kernel(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, H // R, table.count, R),
            in_specs=[*of_operands, *[of_sums] * len(sums)],
            out_specs=[all_queries, of_sums, of_sums],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct((B, H, num_queries, D), q_BHTD.dtype), total, total],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        ),
        cost_estimate=kernel_cost(
            products=5,
            programs=B * H * table.count,
            blocks=blocks,
            arrays=(k_BGSD, k_BGSD, total, total, *sums),
            read_rows=2 * blocks.query_block,
        ),
        interpret=backend("mosaic_tpu").interpret,
        name="attention_gradients",
    )(table.array(), *operands, *sums)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
