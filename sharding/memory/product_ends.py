"""What a kernel of a matrix product computes after it on TPUs."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from .instruction import Instruction, Users
from .primitive_traits import updates

MOST_AFTER_PRODUCT = 100
"""Ops after a product among which the last one of its kernel is searched."""
FEW_SUMMED = 64
"""A matrix product that sums fewer elements is computed again in the tiles of another one that reads it."""


def product_ends(
    instructions: Sequence[Instruction], readers: Users, stored: Collection[Instruction]
) -> dict[Instruction, set[Instruction]]:
    """The last ops in the kernels of products: those on a product's tiles, as long as no other kernel reads one before.

    Returns:
        Last op -> the product and what runs on its tiles.
    """
    place = {one: k for k, one in enumerate(instructions)}
    found: dict[Instruction, set[Instruction]] = {}
    for product in filter(is_product, instructions):
        end, inside = product, {product}
        unread = {product: len(readers[product])}
        """Those inside that others read -> by how many, which aren't inside yet."""
        waiting = [place[x] for x in readers[product]]
        heapq.heapify(waiting)
        while waiting and len(inside) <= MOST_AFTER_PRODUCT and end not in stored:
            one = instructions[heapq.heappop(waiting)]
            if not (one.elementwise or one.name == "transpose" or one.role == "bitcast"):
                break
            inside.add(one)
            for x in inside.intersection(one.operands):
                unread[x] -= 1
                if not unread[x]:
                    del unread[x]
            new = readers[one]
            unread |= {one: len(new)} if new else {}
            for x in new:
                if place[x] not in waiting:
                    heapq.heappush(waiting, place[x])
            if not unread.keys() - {one}:
                end = one
        found[end] = {x for x in inside if place[x] <= place[end]}
    return found


def is_product(one: Instruction) -> bool:
    """Whether it is a product whose kernel computes more: what fuses operands and is no scatter."""
    return one.fuses_operands and not updates(one.name)


def is_small_product(one: Instruction) -> bool:
    """Whether it is a product of two matrices that sums few elements."""
    return one.product is not None and one.product.batch == 1 and one.product.summed < FEW_SUMMED
