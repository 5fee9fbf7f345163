"""What a kernel of a matrix product computes after it on TPUs, and the product inside of another one's kernel."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence

from ..cost.gpu_latencies import Product
from .instruction import Instruction, Users
from .primitive_traits import updates

MOST_AFTER_PRODUCT = 100
"""Ops after a product among which the last one of its kernel is searched."""
MOST_SUMMED_AGAIN = 450
"""Elements that are multiplied and summed in the time that it takes to store one in 16 bits and read it."""
LARGEST_WINDOWS = {False: 3.1e6, True: 4e6}
"""The most elements that a kernel of two products keeps of what has no rows, before it works on its result in parts and
computes the first product for each, by whether the second one sums over the rows of what one op reads."""
IN_BATCHES = 0.65
"""What of it products of many matrices have, whose kernels keep several."""
WIDE = 1024
"""Columns from which on it works on fewer rows at once."""
SUBLANES = 8
"""Of a tile: in batches, a product that doesn't sum a multiple of them is stored."""


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


def is_nested(product: Instruction, reader: Instruction, *, is_read_once: bool) -> bool:
    """Whether the kernel of the only product that reads another one computes that too, as often as it takes.

    The sizes of the windows, and so how often, were fitted to what XLA:TPU did with some 600 pairs of products.

    Args:
        product: the first one, of elements that are computed one by one until the second one reads them.
        reader: the second one.
        is_read_once: whether one op reads the first one.
    """
    first, second = product.product or _pointwise(product), reader.product or _matmul(reader)
    if first is None or second is None or second.batch not in (1, first.batch):
        return False
    if first.batch > 1 and first.summed % SUBLANES:
        return False
    kept = first.rows * first.columns // max(1, second.summed)
    columns = min(kept, second.summed)
    made = second.rows * second.columns * second.batch // max(1, kept * first.batch)
    window = columns * (first.summed + 2.5 * made) + 128 * (first.summed + made)
    largest = LARGEST_WINDOWS[is_read_once and second.summed > kept] * (IN_BATCHES if first.batch > 1 else 1)
    times = math.ceil(window * math.sqrt(max(1, columns / WIDE)) / largest)
    return first.summed * (times - 1) < MOST_SUMMED_AGAIN


def _pointwise(one: Instruction) -> Product | None:
    """A convolution of one element at a time, as the product that it is."""
    found = _matmul(one)
    if found is None or one.num_elements // found.columns != one.operands[0].num_elements // found.summed:
        return None
    return found if one.operands[1].num_elements == found.summed * found.columns else None


def _matmul(one: Instruction) -> Product | None:
    """A convolution as if its window had one element."""
    if one.name != "conv_general_dilated" or one.eqn is None:
        return None
    dims = one.eqn.params["dimension_numbers"]
    columns, summed = one.shape[dims.out_spec[1]], one.operands[0].shape[dims.lhs_spec[1]]
    return Product(
        batch=1,
        rows=one.num_elements // columns,
        columns=columns,
        summed=summed,
        operand_itemsize=int(one.operands[0].itemsize),
        itemsize=int(one.itemsize),
    )
