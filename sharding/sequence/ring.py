"""Ring attention: keys and values rotate around the devices of an axis, in the body of a `shard_map` over it.

Every device permutes its buffers in every step, also when its block is masked: only the computation is conditional. A
step's computation does not depend on the permute issued in the same step, so the two can overlap.

Shape suffixes as in `attention_block`, for local shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import attention_block
from .zigzag_order import MASKED, UNMASKED, Order, blocks, chunk_starts

Carry = TypeVar("Carry")


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A ring of devices along an axis, and the sequence sharded over it."""

    axis: str
    devices: int
    causal: bool
    order: Order
    length: int
    """Sequence length without padding."""
    padded: int
    """Sequence length with padding at its end."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the sequence per device."""
        return chunk_starts(self.devices, self.order).shape[1]

    @cached_property
    def blocks(self) -> np.ndarray:
        """Masking of each block, [device, step, chunk of queries, chunk of keys]; see `token_order.blocks`."""
        return blocks(self.devices, causal=self.causal, order=self.order, length=self.length, padded=self.padded)

    def chunk(self, x: jax.Array, dim: int = -2) -> list[jax.Array]:
        """A local shard, split into its chunks."""
        return jnp.split(x, self.num_chunks, axis=dim)

    def permute(self, tree: Any) -> Any:
        """The buffers of the previous device on the ring, by one collective-permute per leaf."""
        source_target = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis, source_target), tree)

    def rotate(
        self, visit: Callable[[Carry, Any, Any], tuple[Carry, Any]], carry: Carry, buffers: Any
    ) -> tuple[Carry, Any]:
        """Scans `visit(carry, buffers, step) -> (carry, output)` over one full rotation of the buffers.

        Returns:
            The last carry, and the stacked outputs of all steps.
        """

        def turn(both: tuple[Carry, Any], step: jax.Array) -> tuple[tuple[Carry, Any], Any]:
            carry, buffers = both
            following = self.permute(buffers)
            carry, outputs = visit(carry, buffers, step)
            return (carry, following), outputs

        last = jnp.int32(self.devices - 1)
        (carry, buffers), outputs = lax.scan(turn, (carry, buffers), jnp.arange(self.devices - 1))
        carry, end = visit(carry, buffers, last)
        return carry, jax.tree.map(lambda all_, one: jnp.concatenate([all_, one[None]]), outputs, end)

    def apply_block(
        self,
        step: jax.Array,
        queries: int,
        keys: int,
        compute: Callable[[Carry, attention_block.Mask], Carry],
        carry: Carry,
    ) -> Carry:
        """`compute(carry, mask)` if the block of these chunks in this step is not fully masked, else `carry`."""
        kinds = [int(kind) for kind in np.unique(self.blocks[:, :, queries, keys])]

        def partially_masked(carry: Carry) -> Carry:
            return compute(carry, self.mask(step, queries, keys))

        branches = [
            (lambda carry: carry)
            if kind == MASKED
            else (lambda carry: compute(carry, None))
            if kind == UNMASKED
            else partially_masked
            for kind in kinds
        ]
        if len(branches) == 1:
            return branches[0](carry)
        table = np.searchsorted(kinds, self.blocks[:, :, queries, keys]).astype(np.int32)
        return lax.switch(jnp.asarray(table)[lax.axis_index(self.axis), step], branches, carry)

    def mask(self, step: jax.Array, queries: int, keys: int) -> jax.Array:
        """The attention mask [S, T] between a chunk of queries and a chunk of keys."""
        me, firsts = lax.axis_index(self.axis), jnp.asarray(chunk_starts(self.devices, self.order, self.padded))
        offset = jnp.arange(self.padded // (self.devices * self.num_chunks))
        q_S = firsts[me, queries] + offset
        k_T = firsts[(me - step) % self.devices, keys] + offset
        return mask(q_S, k_T, causal=self.causal, length=self.length)

    @property
    def chunk_pairs(self) -> Sequence[tuple[int, int]]:
        """All pairs of a chunk of queries and a chunk of keys."""
        return [(queries, keys) for queries in range(self.num_chunks) for keys in range(self.num_chunks)]


def mask(q_S: jax.Array, k_T: jax.Array, *, causal: bool, length: int) -> jax.Array:
    """The attention mask [S, T] between positions of queries and of keys; padding from `length` on is masked."""
    mask_ST = jnp.broadcast_to(k_T[None, :] < length, (q_S.size, k_T.size))
    return mask_ST & (k_T[None, :] <= q_S[:, None]) if causal else mask_ST


def ring_attention(ring: Ring, q_BGQSD: jax.Array, k_BGTD: jax.Array, v_BGTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp with an online softmax: keys and values rotate together, n - 1 permutes each.

    Memory per device does not grow with n: its own and a neighbour's keys and values, one block of scores, and the
    softmax state of each query.

    References: Liu et al., Ring Attention with Blockwise Transformers, 2023 (2310.01889), algorithm 1.
    """
    queries = ring.chunk(q_BGQSD)

    def visit(states: tuple[attention_block.SoftmaxState, ...], buffers: tuple[jax.Array, jax.Array], step: Any) -> Any:
        found, (keys, values) = list(states), map(ring.chunk, buffers)
        for i, j in ring.chunk_pairs:
            found[i] = ring.apply_block(
                step,
                i,
                j,
                lambda state, mask, i=i, j=j: attention_block.update(state, queries[i], keys[j], values[j], mask),
                found[i],
            )
        return tuple(found), ()

    states, _ = ring.rotate(visit, tuple(map(attention_block.empty_state, queries)), (k_BGTD, v_BGTD))
    outs, sums = zip(*map(attention_block.finalize, states), strict=True)
    return jnp.concatenate(outs, axis=-2), jnp.concatenate(sums, axis=-1)


def ring_self_attention(
    ring: Ring, q_BGQSD: jax.Array, k_BGTD: jax.Array, v_BGTD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp: keys rotate first, then, after an exact softmax of complete rows, values do.

    A device holds its rows of scores, which grow with the global sequence length.

    References: Li et al., Sequence Parallelism: Long Sequence Training from System Perspective, 2021 (2105.13120),
    section 3.2.
    """
    queries = ring.chunk(q_BGQSD)

    def scored(carry: tuple[()], k_BGTD: jax.Array, step: Any) -> tuple[tuple[()], jax.Array]:
        keys = ring.chunk(k_BGTD)
        rows: list[list[jax.Array]] = [[] for _ in queries]
        for i, j in ring.chunk_pairs:
            shape = (*queries[i].shape[:-1], keys[j].shape[-2])
            rows[i].append(
                ring.apply_block(
                    step, i, j,
                    lambda _, mask, i=i, j=j: attention_block.scores(queries[i], keys[j], mask),
                    jnp.full(shape, -jnp.inf, jnp.float32),
                )
            )  # fmt: skip
        return carry, jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)

    _, score_NBGQST = ring.rotate(scored, (), k_BGTD)
    max_BGQS = jnp.max(score_NBGQST, axis=(0, -1))
    max_BGQS = jnp.where(max_BGQS == -jnp.inf, 0, max_BGQS)
    weight_NBGQST = jnp.exp(score_NBGQST - max_BGQS[None, ..., None])

    def summed(outs: tuple[jax.Array, ...], v_BGTD: jax.Array, step: Any) -> tuple[tuple[jax.Array, ...], tuple[()]]:
        found, values = list(outs), ring.chunk(v_BGTD)
        weight_BGQST = lax.dynamic_index_in_dim(weight_NBGQST, step, 0, keepdims=False)
        weights = [ring.chunk(row, -1) for row in ring.chunk(weight_BGQST)]
        for i, j in ring.chunk_pairs:
            found[i] = ring.apply_block(
                step,
                i,
                j,
                lambda out, mask, i=i, j=j: out + attention_block.weighted_values(weights[i][j], values[j]),
                found[i],
            )
        return tuple(found), ()

    empty = tuple(jnp.zeros(part.shape, jnp.float32) for part in queries)
    outs, _ = ring.rotate(summed, empty, v_BGTD)
    sum_BGQS = jnp.sum(weight_NBGQST, axis=(0, -1))
    return attention_block.finalize(attention_block.SoftmaxState(max_BGQS, sum_BGQS, jnp.concatenate(outs, axis=-2)))


def gradients(
    ring: Ring, queries: attention_block.QueryResiduals, k_BGTD: jax.Array, v_BGTD: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values, float32: a second ring that also rotates those of keys and values.

    They are permuted n times, the last time back to their own device. Weights are recomputed from the logsumexp, so the
    forward ring saves only its results.
    """
    parts = [
        attention_block.QueryResiduals(*part)
        for part in zip(*(ring.chunk(x, -2 if x.ndim == 5 else -1) for x in queries), strict=True)
    ]
    zeros = [jnp.zeros(part.q_BGQSD.shape, jnp.float32) for part in parts]

    def visit(
        found: list[jax.Array], buffers: Sequence[jax.Array], step: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        found = list(found)
        keys, values, dkeys, dvalues = map(ring.chunk, buffers)
        for i, j in ring.chunk_pairs:

            def accumulate(sums: Any, mask: attention_block.Mask, i: int = i, j: int = j) -> Any:
                return jax.tree.map(jnp.add, sums, attention_block.gradients(parts[i], keys[j], values[j], mask))

            found[i], dkeys[j], dvalues[j] = ring.apply_block(step, i, j, accumulate, (found[i], dkeys[j], dvalues[j]))
        return found, [jnp.concatenate(dkeys, axis=-2), jnp.concatenate(dvalues, axis=-2)]

    def turn(carry: Any, step: jax.Array) -> tuple[Any, None]:
        found, buffers, sums = carry
        following = ring.permute(buffers)
        found, sums = visit(found, [*buffers, *sums], step)
        return (found, following, ring.permute(sums)), None

    sums = [jnp.zeros(x.shape, jnp.float32) for x in (k_BGTD, v_BGTD)]
    start = (zeros, [k_BGTD, v_BGTD], sums)
    (found, buffers, sums), _ = lax.scan(turn, start, jnp.arange(ring.devices - 1))
    found, sums = visit(found, [*buffers, *sums], jnp.int32(ring.devices - 1))
    return (jnp.concatenate(found, axis=-2), *ring.permute(sums))
