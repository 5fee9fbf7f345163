"""Matrix products that share an operand and run as one on GPUs, whose results are slices of its result.

openxla/xla, `hlo/transforms/simplifiers/dot_merger.cc`: products with the same dims, of which none depends on another,
are merged in the program's order if one of each two is small. Compiled programs show what counts as small: the result
and the operand that is not shared together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

MOST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product."""

    operands: tuple[int, int]
    """Numbers of the arrays it multiplies."""
    operand_bytes: tuple[int, int]
    result_bytes: int
    kind: object
    """Equal for products that may be merged: their dims and dtypes."""
    needs: int
    """A bit for each product that it depends on, and its own."""


def merged_products(products: Sequence[Product]) -> list[tuple[list[int], int]]:
    """The groups of products that run as one, each with the side of the shared operand.

    Args:
        products: in program order.
    """
    candidates: dict[tuple[int, int, object], list[int]] = {}
    for n, product in enumerate(products):
        for side, x in enumerate(product.operands):
            candidates.setdefault((x, side, product.kind), []).append(n)
    found: list[tuple[list[int], int]] = []
    needs = [product.needs for product in products]
    done: set[int] = set()
    for (_, side, _), members in candidates.items():
        left = [n for n in members if n not in done]
        while len(left) > 1:
            group = left[:1]
            for n in left[1:]:
                if _is_mergeable([products[m] for m in (*group, n)], 1 - side) and _are_independent(group, n, needs):
                    group.append(n)
            if len(group) > 1:
                found.append((group, side))
                done.update(group)
                _unite(group, needs)
            left = [n for n in left if n not in group]
    return found


def _is_mergeable(products: Sequence[Product], side: int) -> bool:
    """Whether a product is small, by the operand of a side."""
    return any(p.result_bytes + p.operand_bytes[side] <= MOST_BYTES for p in products)


def _are_independent(group: Sequence[int], n: int, needs: Sequence[int]) -> bool:
    return all(not needs[m] >> n & 1 and not needs[n] >> m & 1 for m in group)


def _unite(group: Sequence[int], needs: list[int]) -> None:
    """What depends on one product of a group depends on all of it, and on what that needs."""
    mask = sum(1 << m for m in group)
    united = 0
    for m in group:
        united |= needs[m]
    for n, needed in enumerate(needs):
        if needed & mask:
            needs[n] = needed | united


def topological_order(operands: Sequence[Sequence[int]]) -> list[int]:
    """Ops that are each as early as their operands allow, otherwise in the order given.

    Args:
        operands: per op those whose results it reads, also later ones.
    """
    readers: list[list[int]] = [[] for _ in operands]
    missing = [len(set(sources)) for sources in operands]
    for k, sources in enumerate(operands):
        for j in set(sources):
            readers[j].append(k)
    ready = [k for k, count in enumerate(missing) if not count]
    found: list[int] = []
    while ready:
        found.append(heapq.heappop(ready))
        for reader in readers[found[-1]]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    assert len(found) == len(operands)
    return found
