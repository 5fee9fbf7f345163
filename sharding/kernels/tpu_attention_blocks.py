"""What the two TPU kernels of attention share: the table of blocks, layouts, and the scores of a block.

Shape suffixes: B batch, H query heads, G key heads, R query heads of a key head, T queries, S keys, D features; t and s
are those of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from .attention_masks import Block, Blocks, Scores
from .chunked_attention import Segments

LANES = 128

FIRST, LAST, PARTIAL = 1, 2, 4
"""Flags of a block: the first or last of its row of blocks, and whether a band or the end of the keys cuts it."""


@dataclass(frozen=True, slots=True)
class Table:
    """The blocks that programs visit one after the other, as an array in scalar memory: queries, keys, flags."""

    visits: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, visited: Sequence[Block], row: Callable[[Block], int]) -> Table:
        """Of blocks sorted by row: by what is accumulated."""
        rows = [row(block) for block in visited]
        starts = [i == 0 or rows[i - 1] != rows[i] for i in range(len(rows))]
        flags = [
            FIRST * start | LAST * end | PARTIAL * block.is_partial
            for block, start, end in zip(visited, starts, [*starts[1:], True], strict=True)
        ]
        return cls(tuple((block.query, block.key, flag) for block, flag in zip(visited, flags, strict=True)))

    @property
    def count(self) -> int:
        """Blocks."""
        return len(self.visits)

    def array(self) -> jax.Array:
        """What is prefetched: [3 * count]."""
        return jnp.asarray(np.array(self.visits, np.int32).T.reshape(-1))

    def query(self, ref: Any, i: Any) -> Any:
        """The block of queries of program i."""
        return ref[i]

    def key(self, ref: Any, i: Any) -> Any:
        """The block of keys of program i."""
        return ref[self.count + i]

    def flags(self, ref: Any, i: Any) -> Any:
        """The flags of program i's block."""
        return ref[2 * self.count + i]


@dataclass(frozen=True, slots=True)
class Specs:
    """Block specs of arrays with heads in front of positions."""

    queries: pl.BlockSpec
    """Of [B, H, T, D]."""
    keys: pl.BlockSpec
    """Of [B, G, S, D]."""
    statistics: pl.BlockSpec
    """Of [B, H, 1, T]."""
    segments: tuple[pl.BlockSpec, pl.BlockSpec]
    """Of [B, 1, T] and [B, 1, S]."""

    @classmethod
    def of(
        cls, table: Table, blocks: Blocks, num_features: int, place: Callable[..., tuple[Any, Any, Any, Any]]
    ) -> Specs:
        """Returns them.

        Args:
            table: what programs visit.
            blocks: its blocks.
            num_features: D.
            place: program ids -> batch, query head, key head, and index in the table.
        """

        def spec(shape: tuple[int | None, ...], index: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
            return pl.BlockSpec(shape, lambda *ids: index(*place(*ids[:-1]), ids[-1]))

        t, s, D = blocks.query_block, blocks.key_block, num_features
        return cls(
            queries=spec((None, None, t, D), lambda b, h, g, i, ref: (b, h, table.query(ref, i), 0)),
            keys=spec((None, None, s, D), lambda b, h, g, i, ref: (b, g, table.key(ref, i), 0)),
            statistics=spec((None, None, 1, t), lambda b, h, g, i, ref: (b, h, 0, table.query(ref, i))),
            segments=(
                spec((None, 1, t), lambda b, h, g, i, ref: (b, 0, table.query(ref, i))),
                spec((None, 1, s), lambda b, h, g, i, ref: (b, 0, table.key(ref, i))),
            ),
        )


def by_mask(flags: Any, update: Callable[[bool], None]) -> None:
    """Runs an update of a block with or without its mask."""
    pl.when(flags & PARTIAL != 0)(partial(update, True))
    pl.when(flags & PARTIAL == 0)(partial(update, False))


def block_scores(
    scores: Scores,
    blocks: Blocks,
    at: tuple[Any, Any],
    q_tD: jax.Array,
    k_sD: jax.Array,
    segment_refs: Sequence[Any],
    is_partial: bool,
) -> jax.Array:
    """Scores of a block, keys by queries [s, t]; -inf where masked."""
    score_st = product(k_sD, q_tD, 1, 1) * scores.scale
    if is_partial:
        query = at[0] * blocks.query_block + jax.lax.broadcasted_iota(jnp.int32, score_st.shape, 1)
        key = at[1] * blocks.key_block + jax.lax.broadcasted_iota(jnp.int32, score_st.shape, 0)
        seen = blocks.sees(scores.band, query, key)
        score_st = score_st if seen is None else jnp.where(seen, score_st, -jnp.inf)
    if segment_refs:
        of_queries_1t, of_keys_1s = (ref[...] for ref in segment_refs)
        of_keys_s1 = jnp.broadcast_to(of_keys_1s, (LANES, of_keys_1s.shape[1])).T[:, :1]
        score_st = jnp.where(of_keys_s1 == of_queries_1t, score_st, -jnp.inf)
    return score_st


def product(x: jax.Array, y: jax.Array, of_x: int, of_y: int) -> jax.Array:
    """Of two matrices over a dim of each, in float32."""
    return jax.lax.dot_general(x, y, (((of_x,), (of_y,)), ((), ())), preferred_element_type=jnp.float32)


def heads_first(x_BTHD: jax.Array, padding: int) -> jax.Array:
    """[B, H, T, D], with zeros past the end."""
    return jnp.pad(jnp.moveaxis(x_BTHD, 2, 1), [(0, 0), (0, 0), (0, padding), (0, 0)])


def positions_first(x_BHTD: jax.Array, length: int) -> jax.Array:
    """[B, T, H, D], without padding."""
    return jnp.moveaxis(x_BHTD[:, :, :length], 1, 2)


def segment_rows(segments: Segments, blocks: Blocks) -> list[jax.Array]:
    """[B, 1, T] and [B, 1, S], padded."""
    paddings = (blocks.query_padding, blocks.key_padding)
    return [jnp.pad(x.astype(jnp.int32), [(0, 0), (0, n)])[:, None] for x, n in zip(segments, paddings, strict=False)]


def kernel_cost(
    *, products: int, programs: int, blocks: Blocks, arrays: Sequence[Any], read_rows: int
) -> pl.CostEstimate:
    """FLOPs, exponentials and bytes of all programs.

    Args:
        products: of matrices, in each program.
        programs: their number.
        blocks: what each has one of.
        arrays: those that are read or written once, the first of queries.
        read_rows: vectors of D features that each program reads beside.
    """
    elements, like = programs * blocks.query_block * blocks.key_block, arrays[0]
    return pl.CostEstimate(
        flops=2 * products * elements * like.shape[-1],
        transcendentals=elements,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays)
        + programs * read_rows * like.shape[-1] * like.dtype.itemsize,
    )
