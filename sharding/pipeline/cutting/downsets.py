"""Downsets of a graph of ops: sets that contain, with each op, all ops that it reads from.

Sets are ints, bit v for op v. The ops between two nested downsets are contiguous: no path leaves and re-enters them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ...errors import ShardingError

MOST_DOWNSETS = 5_000
"""Plans look at all pairs of them."""

Edges = Sequence[tuple[int, int]]
"""(op, op that reads its result)."""


def check_edges(asked: str, num_ops: int, edges: Edges) -> None:
    """Raises unless edges connect different ops of a graph without cycles."""
    bad = [edge for edge in edges if len(edge) != 2 or edge[0] == edge[1] or not all(0 <= op < num_ops for op in edge)]
    if bad:
        raise ShardingError(f"{asked}(edges)", found=f"{bad[0]}", required=f"two different ops below {num_ops}")
    if len(topological_order(num_ops, edges)) < num_ops:
        raise ShardingError(f"{asked}(edges)", found="a cycle", required="a graph without cycles")


def topological_order(num_ops: int, edges: Edges) -> list[int]:
    """Ops after all that they read from, the first possible one first; without those on cycles and after them."""
    missing = read_by(num_ops, edges)
    order: list[int] = []
    done = 0
    left = set(range(num_ops))
    while ready := [op for op in sorted(left) if missing[op] & ~done == 0]:
        order.append(ready[0])
        left.remove(ready[0])
        done |= 1 << ready[0]
    return order


def read_by(num_ops: int, edges: Edges) -> list[int]:
    """Per op, the set of ops that it reads from."""
    found = [0] * num_ops
    for producer, consumer in edges:
        found[consumer] |= 1 << producer
    return found


def downsets(asked: str, num_ops: int, edges: Edges) -> list[int]:
    """All downsets, smaller ones first: n + 1 of a chain, 2^n of n ops without edges.

    Example:
        >>> downsets("here", 3, [(0, 1), (0, 2)])
        [0, 1, 3, 5, 7]

    Raises:
        ShardingError: more than `MOST_DOWNSETS`.
    """
    reads = read_by(num_ops, edges)
    found: list[int] = []
    layer = {0}
    while layer:
        found += sorted(layer)
        if len(found) > MOST_DOWNSETS:
            raise ShardingError(
                f"{asked}: {num_ops} ops",
                found=f"more than {MOST_DOWNSETS:,} downsets",
                required="fewer: groups of ops as one, or a graph that is nearly a chain",
                fix="edges=cutting.chained(len(seconds), edges), a chain in topological order",
            )
        layer = {
            downset | 1 << op
            for downset in layer
            for op in range(num_ops)
            if not downset >> op & 1 and reads[op] & ~downset == 0
        }
    return found


def chained(num_ops: int, edges: Edges) -> list[tuple[int, int]]:
    """The edges with those of a chain through all ops, in topological order, so that there are few downsets.

    Example:
        >>> chained(3, [(0, 2), (2, 1)])
        [(0, 2), (2, 1), (0, 2), (2, 1)]
    """
    return [*edges, *pairwise(topological_order(num_ops, edges))]


def members(ops: int) -> tuple[int, ...]:
    """The ops of a set, ascending."""
    return tuple(op for op in range(ops.bit_length()) if ops >> op & 1)
