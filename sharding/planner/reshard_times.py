"""Seconds of collectives between all pairs of shardings of one array, and the bytes that they put on the wire, at once.

A sharding is a row of an array int8 [shardings, axes]: the dim that each mesh axis shards, `REPLICATED`, or `PARTIAL`
for a sum that is not complete over the axis. Several axes on one dim are in the mesh's order. A transition slices, sums
(reduce-scatters what stays sharded, all-reduces the rest), moves axes by all-to-alls, puts shards in order where a dim
gets or loses a major axis, then gathers, dim by dim, each with all axes of the dim at once: the chain that
`rewrite.reshard` finds for most pairs, without a search.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..cost import Kind, Topology, collective_seconds
from ..cost.collective_time import collective_wire_bytes

REPLICATED, PARTIAL = -1, -2


class ReshardTimes:
    """The collectives of one mesh, each timed once.

    Args:
        on: the mesh.

    Attributes:
        axes: the mesh axes of more than one device.
        sizes: their sizes, int64 [axes].
    """

    def __init__(self, on: Topology):
        self.on = on
        self.axes = tuple(axis for axis, size in on.sizes if size > 1)
        self.sizes = np.array([dict(on.sizes)[axis] for axis in self.axes], np.int64)
        self._masks = 1 << np.arange(len(self.axes))
        self._known: dict[tuple[Kind, int, float], tuple[float, float]] = {}

    def num_parts(self, shardings: np.ndarray) -> np.ndarray:
        """Into how many parts each sharding cuts an array, int64 [...]."""
        return np.where(shardings >= 0, self.sizes, 1).prod(axis=-1)

    def parts_of(self, shardings: np.ndarray, dim: int) -> np.ndarray:
        """Into how many parts each sharding cuts one dim, int64 [...]."""
        return np.where(shardings == dim, self.sizes, 1).prod(axis=-1)

    def moves(self, have: np.ndarray, want: np.ndarray, num_bytes: float) -> np.ndarray:
        """What it takes from each of some shardings to each of others.

        Args:
            have: int8 [..., axes].
            want: int8 [..., axes], which broadcasts against `have`; nothing is `PARTIAL`.
            num_bytes: of the whole array.

        Returns:
            float64 [2, ...]: seconds, and bytes that a device puts on the wire.
        """
        have, want = np.broadcast_arrays(have, want)
        kept = (have == want) & (have >= 0)
        sliced, scattered = (have == REPLICATED) & (want >= 0), (have == PARTIAL) & (want >= 0)
        moved = (have >= 0) & (want >= 0) & ~kept
        before = num_bytes / self.num_parts(np.where(sliced, want, have))
        after = before / self.num_parts(np.where(scattered, want, REPLICATED))
        gathered, whole = (have >= 0) & (want < 0), num_bytes / self.num_parts(want)
        total = self._all("all-reduce", (have == PARTIAL) & (want < 0), after)
        total += self._all("all-to-all", moved, after)
        total += self._all("collective-permute", self._displaced(have, want, kept), after)
        for dim in range(int(max(have.max(initial=-1), want.max(initial=-1))) + 1):
            total += self._all(
                "reduce-scatter", scattered & (want == dim), before / self._parts(scattered & (want < dim))
            )
            total += self._all("all-gather", gathered & (have == dim), whole / self._parts(gathered & (have > dim)))
        return total

    def _parts(self, over: np.ndarray) -> np.ndarray:
        """The number of devices along the axes marked in `over`, int64 [...]."""
        return np.where(over, self.sizes, 1).prod(axis=-1)

    def _displaced(self, have: np.ndarray, want: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """The axes whose shards change places, as a dim gets or loses a major axis, bool [..., axes]."""
        found = np.zeros(kept.shape, bool)
        for a, b in itertools.combinations(range(len(self.axes)), 2):
            pair = kept[..., b] & ~kept[..., a] & ((have[..., a] == have[..., b]) | (want[..., a] == have[..., b]))
            found[..., a] |= pair
            found[..., b] |= pair
        return found

    def _all(self, kind: Kind, over: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        """What a collective takes over the axes marked in `over`, bool [..., axes]; 0 where none is."""
        masks = over @ self._masks
        found = np.zeros((2, *masks.shape))
        used = masks > 0
        if used.any():
            pairs = np.stack([masks[used].astype(float), num_bytes[used]], axis=1)
            distinct, at = np.unique(pairs, axis=0, return_inverse=True)
            each = np.array([self._one(kind, int(mask), size) for mask, size in distinct])
            found[:, used] = each[at.reshape(-1)].T
        return found

    def _one(self, kind: Kind, mask: int, num_bytes: float) -> tuple[float, float]:
        key = kind, mask, num_bytes
        if key not in self._known:
            axes = [axis for axis, bit in zip(self.axes, self._masks, strict=True) if mask & bit]
            wire_bytes = collective_wire_bytes(kind, num_bytes, axes, self.on)
            self._known[key] = collective_seconds(kind, num_bytes, axes, self.on), wire_bytes
        return self._known[key]


def shardings_of(
    lengths: Sequence[int], sizes: np.ndarray, *, dims: Collection[int] | None = None, most: int
) -> np.ndarray:
    """All ways to put mesh axes on dims, the replicated one first.

    Args:
        lengths: of the dims.
        sizes: of the axes.
        dims: those that may be sharded. Default: all.
        most: if there are more ways, the shortest dims stay whole.

    Returns:
        int8 [shardings, axes]; the axes of each dim divide it.
    """
    free = [d for d in (range(len(lengths)) if dims is None else dims) if lengths[d] > 1]
    free = [d for d in free if any(lengths[d] % size == 0 for size in sizes)]
    free.sort(key=lambda d: -lengths[d])
    while len(free) > 1 and (len(free) + 1) ** len(sizes) > most:
        free.pop()
    rows = []
    for row in itertools.product([REPLICATED, *sorted(free)], repeat=len(sizes)):
        parts: dict[int, int] = {}
        for d, size in zip(row, sizes, strict=True):
            parts[d] = parts.get(d, 1) * int(size)
        if all(d < 0 or lengths[d] % count == 0 for d, count in parts.items()):
            rows.append(row)
    return np.array(rows, np.int8).reshape(len(rows), len(sizes))


def translated(shardings: np.ndarray, table: Mapping[int, int], *, default: int = REPLICATED) -> np.ndarray:
    """Shardings with every dim replaced by what a table has for it; what it lacks becomes `default`."""
    size = max([-1, *table, int(shardings.max(initial=-1))]) + 1
    lookup = np.full(size + 2, default, np.int8)  # the last two are PARTIAL and REPLICATED, by negative indices
    lookup[-1], lookup[-2] = REPLICATED, PARTIAL
    for d, other in table.items():
        lookup[d] = other
    return lookup[shardings]
