"""Attention with keys and values that go around a ring of devices, as the body of a `shard_map` over its axis.

All devices pass on what they hold in every step, whether or not they have anything to compute with it: only the
computing is behind a condition. A step's computing doesn't wait for what arrives in it.

Shape suffixes as in `block`; here they are of a device's part.
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

from . import block
from .order import MASKED, WHOLE, Order, blocks, starts

Carry = TypeVar("Carry")


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Devices along an axis, and the sequence over them."""

    axis: str
    devices: int
    causal: bool
    order: Order
    length: int
    """Of the sequence, ..."""
    padded: int
    """... and with what is added at its end."""

    @property
    def chunks(self) -> int:
        """Of the sequence on each device."""
        return starts(self.devices, self.order).shape[1]

    @cached_property
    def blocks(self) -> np.ndarray:
        """What is to compute, [device, step, chunk of queries, chunk of keys]."""
        return blocks(self.devices, causal=self.causal, order=self.order, length=self.length, padded=self.padded)

    def cut(self, x: jax.Array, dim: int = -2) -> list[jax.Array]:
        """A device's part by chunks."""
        return jnp.split(x, self.chunks, axis=dim)

    def shifted(self, tree: Any) -> Any:
        """What the device before holds."""
        pairs = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis, pairs), tree)

    def around(
        self, visit: Callable[[Carry, Any, Any], tuple[Carry, Any]], carry: Carry, held: Any
    ) -> tuple[Carry, Any]:
        """(carry, held, step) -> carry and what is kept of each step, for all that the devices hold in turn.

        Returns:
            The last carry, and what was kept of each step, stacked.
        """

        def turn(both: tuple[Carry, Any], step: jax.Array) -> tuple[tuple[Carry, Any], Any]:
            carry, held = both
            following = self.shifted(held)
            carry, kept = visit(carry, held, step)
            return (carry, following), kept

        last = jnp.int32(self.devices - 1)
        (carry, held), kept = lax.scan(turn, (carry, held), jnp.arange(self.devices - 1))
        carry, end = visit(carry, held, last)
        return carry, jax.tree.map(lambda all_, one: jnp.concatenate([all_, one[None]]), kept, end)

    def visited(
        self,
        step: jax.Array,
        queries: int,
        keys: int,
        compute: Callable[[Carry, block.Seen], Carry],
        carry: Carry,
    ) -> Carry:
        """`compute(carry, seen)` where in a step chunks of queries and keys have a block that is not all masked."""
        kinds = [int(kind) for kind in np.unique(self.blocks[:, :, queries, keys])]

        def partly(carry: Carry) -> Carry:
            return compute(carry, self.seen(step, queries, keys))

        ways = [
            (lambda carry: carry)
            if kind == MASKED
            else (lambda carry: compute(carry, None))
            if kind == WHOLE
            else partly
            for kind in kinds
        ]
        if len(ways) == 1:
            return ways[0](carry)
        table = np.searchsorted(kinds, self.blocks[:, :, queries, keys]).astype(np.int32)
        return lax.switch(jnp.asarray(table)[lax.axis_index(self.axis), step], ways, carry)

    def seen(self, step: jax.Array, queries: int, keys: int) -> jax.Array:
        """[S, T]: which keys of a chunk the queries of another see."""
        me, firsts = lax.axis_index(self.axis), jnp.asarray(starts(self.devices, self.order, self.padded))
        within = jnp.arange(self.padded // (self.devices * self.chunks))
        q_S = firsts[me, queries] + within
        k_T = firsts[(me - step) % self.devices, keys] + within
        return seen(q_S, k_T, causal=self.causal, length=self.length)

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        """Chunks of queries and of keys."""
        return [(queries, keys) for queries in range(self.chunks) for keys in range(self.chunks)]


def seen(q_S: jax.Array, k_T: jax.Array, *, causal: bool, length: int) -> jax.Array:
    """[S, T]: whether the query at a position sees the key at another."""
    seen_ST = jnp.broadcast_to(k_T[None, :] < length, (q_S.size, k_T.size))
    return seen_ST & (k_T[None, :] <= q_S[:, None]) if causal else seen_ST


def online(ring: Ring, q_BGQSD: jax.Array, k_BGTD: jax.Array, v_BGTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and logarithm of the sum: keys and values go around together, n - 1 times each.

    What a device holds does not grow with their number: its own and a neighbour's keys and values, a block of scores,
    and for each query the state of its softmax.

    References: Liu et al., Ring Attention with Blockwise Transformers, 2023 (2310.01889), algorithm 1.
    """
    queries = ring.cut(q_BGQSD)

    def visit(states: tuple[block.State, ...], held: tuple[jax.Array, jax.Array], step: Any) -> Any:
        found, (keys, values) = list(states), map(ring.cut, held)
        for i, j in ring.pairs:
            found[i] = ring.visited(
                step,
                i,
                j,
                lambda state, seen, i=i, j=j: block.add(state, queries[i], keys[j], values[j], seen),
                found[i],
            )
        return tuple(found), ()

    states, _ = ring.around(visit, tuple(map(block.nothing, queries)), (k_BGTD, v_BGTD))
    outs, sums = zip(*map(block.result, states), strict=True)
    return jnp.concatenate(outs, axis=-2), jnp.concatenate(sums, axis=-1)


def whole_rows(ring: Ring, q_BGQSD: jax.Array, k_BGTD: jax.Array, v_BGTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and logarithm of the sum: keys go around first, then, after an exact softmax of whole rows, values do.

    A device holds its rows of scores, which grow with the whole sequence.

    References: Li et al., Sequence Parallelism: Long Sequence Training from System Perspective, 2021 (2105.13120),
    section 3.2.
    """
    queries = ring.cut(q_BGQSD)

    def scored(carry: tuple[()], k_BGTD: jax.Array, step: Any) -> tuple[tuple[()], jax.Array]:
        keys = ring.cut(k_BGTD)
        rows: list[list[jax.Array]] = [[] for _ in queries]
        for i, j in ring.pairs:
            shape = (*queries[i].shape[:-1], keys[j].shape[-2])
            rows[i].append(
                ring.visited(
                    step, i, j,
                    lambda _, seen, i=i, j=j: block.scores(queries[i], keys[j], seen),
                    jnp.full(shape, -jnp.inf, jnp.float32),
                )
            )  # fmt: skip
        return carry, jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)

    _, score_NBGQST = ring.around(scored, (), k_BGTD)
    highest_BGQS = jnp.max(score_NBGQST, axis=(0, -1))
    highest_BGQS = jnp.where(highest_BGQS == -jnp.inf, 0, highest_BGQS)
    weight_NBGQST = jnp.exp(score_NBGQST - highest_BGQS[None, ..., None])

    def summed(outs: tuple[jax.Array, ...], v_BGTD: jax.Array, step: Any) -> tuple[tuple[jax.Array, ...], tuple[()]]:
        found, values = list(outs), ring.cut(v_BGTD)
        weight_BGQST = lax.dynamic_index_in_dim(weight_NBGQST, step, 0, keepdims=False)
        weights = [ring.cut(row, -1) for row in ring.cut(weight_BGQST)]
        for i, j in ring.pairs:
            found[i] = ring.visited(
                step, i, j, lambda out, seen, i=i, j=j: out + block.mixed(weights[i][j], values[j]), found[i]
            )
        return tuple(found), ()

    empty = tuple(jnp.zeros(part.shape, jnp.float32) for part in queries)
    outs, _ = ring.around(summed, empty, v_BGTD)
    sum_BGQS = jnp.sum(weight_NBGQST, axis=(0, -1))
    return block.result(block.State(highest_BGQS, sum_BGQS, jnp.concatenate(outs, axis=-2)))


def gradients(
    ring: Ring, queries: block.Queries, k_BGTD: jax.Array, v_BGTD: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of queries, keys and values, float32: a second ring, in which those of keys and values travel too.

    They go n times, the last time home. Weights are computed again from the logarithms of their sums, so that nothing
    of the first ring is kept but its result.
    """
    parts = [
        block.Queries(*part) for part in zip(*(ring.cut(x, -2 if x.ndim == 5 else -1) for x in queries), strict=True)
    ]
    nothing = [jnp.zeros(part.q_BGQSD.shape, jnp.float32) for part in parts]

    def visit(found: list[jax.Array], held: Sequence[jax.Array], step: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        found = list(found)
        keys, values, dkeys, dvalues = map(ring.cut, held)
        for i, j in ring.pairs:

            def more(sums: Any, seen: block.Seen, i: int = i, j: int = j) -> Any:
                return jax.tree.map(jnp.add, sums, block.gradients(parts[i], keys[j], values[j], seen))

            found[i], dkeys[j], dvalues[j] = ring.visited(step, i, j, more, (found[i], dkeys[j], dvalues[j]))
        return found, [jnp.concatenate(dkeys, axis=-2), jnp.concatenate(dvalues, axis=-2)]

    def turn(carry: Any, step: jax.Array) -> tuple[Any, None]:
        found, held, sums = carry
        following = ring.shifted(held)
        found, sums = visit(found, [*held, *sums], step)
        return (found, following, ring.shifted(sums)), None

    sums = [jnp.zeros(x.shape, jnp.float32) for x in (k_BGTD, v_BGTD)]
    start = (nothing, [k_BGTD, v_BGTD], sums)
    (found, held, sums), _ = lax.scan(turn, start, jnp.arange(ring.devices - 1))
    found, sums = visit(found, [*held, *sums], jnp.int32(ring.devices - 1))
    return (jnp.concatenate(found, axis=-2), *ring.shifted(sums))
