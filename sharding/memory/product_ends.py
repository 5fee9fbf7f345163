"""What a kernel of a matrix product computes after it on TPUs, and how long that takes."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from .instruction import Instruction, Users
from .primitive_traits import updates

MOST_AFTER_PRODUCT = 100
"""Ops after a product among which the last one of its kernel is searched."""
FEW_SUMMED = 64
"""A matrix product that sums fewer elements is computed again in the tiles of another one that reads it."""
VECTOR_OPS: Mapping[str, int] = {
    **dict.fromkeys("div rem integer_pow log log1p expm1 cbrt".split(), 10),
    **dict.fromkeys("logistic atan2 asin acos pow".split(), 15),
    **dict.fromkeys("erf erfc erf_inv lgamma digamma".split(), 50),
    **dict.fromkeys("sin cos tan".split(), 100),
}
"""Primitives that take more than one instruction of a vector unit -> about how many."""


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


def num_vector_ops(end: Instruction, reads: Collection[Instruction], *, limit: float) -> int:
    """How many instructions of a vector unit compute an element from what is read, counted up to a limit."""
    found, waiting, count = {end}, [end], 0
    while waiting and count <= limit:
        one = waiting.pop()
        count += VECTOR_OPS.get(one.name, 1) if one.elementwise else 0
        new = [x for x in one.operands if x not in reads and x not in found and x.num_elements >= end.num_elements]
        found.update(new)
        waiting += new
    return count
