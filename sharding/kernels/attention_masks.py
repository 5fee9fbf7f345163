"""Which keys a query sees: a band of positions, segments, and the blocks of scores that a band leaves.

Blocks that nobody sees are never visited: their list is static, and so is the number of steps of a loop over it.

Shape suffixes: T positions of queries, S positions of keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

EMPTY = -1e30
"""The logsumexp of a query that sees no key: finite, so that parts combine without NaN."""

Window = int | tuple[int, int] | None
"""Keys before and after a query's own position that it sees; a number is both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A query at position t sees keys at positions from `t - before` to `t + after`; None is without bound."""

    before: int | None
    after: int | None

    @classmethod
    def of(cls, causal: bool, window: Window) -> Band:
        """The band of a causal mask and a window."""
        before, after = (window, window) if isinstance(window, int) else window or (None, None)
        return cls(before=before, after=0 if causal else after)

    @property
    def is_bounded(self) -> bool:
        """Whether it masks anything, and so depends on positions."""
        return self.before is not None or self.after is not None

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array | None:
        """Whether queries at some positions see keys at others; None if all do."""
        inside = [] if self.before is None else [key >= query - self.before]
        inside += [] if self.after is None else [key <= query + self.after]
        return functools.reduce(jnp.logical_and, inside) if inside else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How scores come from products of queries and keys: `scale * q . k` inside the band."""

    scale: float
    band: Band


class Block(NamedTuple):
    """A block of scores."""

    query: int
    """Its first query's position in units of blocks."""
    key: int
    is_partial: bool
    """Whether some of its queries don't see some of its keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A division of scores [T, S] into blocks, all of one size; the last ones reach past the end."""

    num_queries: int
    num_keys: int
    query_block: int
    """Queries in a block."""
    key_block: int

    @classmethod
    def of(cls, num_queries: int, num_keys: int, most: tuple[int, int], multiple: int = 1) -> Blocks:
        """Blocks of nearly equal size.

        Args:
            num_queries: T.
            num_keys: S.
            most: queries and keys in a block, at most.
            multiple: what the block's sizes are a multiple of.
        """
        return cls(
            num_queries=num_queries,
            num_keys=num_keys,
            query_block=_even(num_queries, most[0], multiple),
            key_block=_even(num_keys, most[1], multiple),
        )

    @property
    def query_padding(self) -> int:
        """Queries past the end."""
        return -self.num_queries % self.query_block

    @property
    def key_padding(self) -> int:
        """Keys past the end."""
        return -self.num_keys % self.key_block

    def visited(self, band: Band) -> list[Block]:
        """The blocks in which some query sees a key, by queries, then keys."""
        rows = range(-(-self.num_queries // self.query_block))
        columns = range(-(-self.num_keys // self.key_block))
        return [Block(t, s, self._is_partial(band, t, s)) for t in rows for s in columns if self._is_seen(band, t, s)]

    def sees(self, band: Band, query: jax.Array, key: jax.Array) -> jax.Array | None:
        """As `Band.sees`, where keys past the end are seen by nobody."""
        inside = band.sees(query, key)
        if not self.key_padding:
            return inside
        real = key < self.num_keys
        return real if inside is None else inside & real

    def _distances(self, t: int, s: int) -> tuple[int, int]:
        """The least and the greatest position of a key relative to a query."""
        first_query, first_key = t * self.query_block, s * self.key_block
        last_query = min(first_query + self.query_block, self.num_queries) - 1
        last_key = min(first_key + self.key_block, self.num_keys) - 1
        return first_key - last_query, last_key - first_query

    def _is_seen(self, band: Band, t: int, s: int) -> bool:
        least, most = self._distances(t, s)
        return (band.after is None or least <= band.after) and (band.before is None or most >= -band.before)

    def _is_partial(self, band: Band, t: int, s: int) -> bool:
        least, most = self._distances(t, s)
        outside = (band.after is not None and most > band.after) or (band.before is not None and least < -band.before)
        return outside or (s + 1) * self.key_block > self.num_keys


def _even(length: int, most: int, multiple: int) -> int:
    count = -(-length // most)
    return -(-length // (count * multiple)) * multiple
