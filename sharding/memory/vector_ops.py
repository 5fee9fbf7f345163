"""How long the vector units of a TPU take for elementwise ops: about, as XLA:TPU's fusion was seen to weigh them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from ..cost.gpu_latencies import Product
from .instruction import Instruction

HIDDEN_OPS = 8
"""On each element that a kernel computes in the time that it takes to read it."""
AGAIN_PER_OP = {False: 0.5, True: 0.12}
"""Bytes that are read in the time of one op on each element; products hide more of it."""
MOST_AGAIN: Mapping[tuple[bool, bool], tuple[float, float]] = {
    (False, False): (3.3, 2.2),
    (False, True): (5.5, 11.5),
    (True, False): (3.3, 5.9),
    (True, True): (5.0, 16.0),
}
"""By whether an array has more than two dims, and whether its elements have 32 bits: the ops on each element that
kernels of products compute again for every array of its size that needn't be written or read, and those besides."""
COLUMNS = 1024
"""Of a product whose kernel hides no more of them than that of a smaller one."""
VECTOR_OPS: Mapping[str, int] = {
    "div": 7,
    "logistic": 8,
    **dict.fromkeys("cbrt rem".split(), 10),
    "integer_pow": 2,
    **dict.fromkeys("atan2 asin acos pow".split(), 15),
    **dict.fromkeys("erf erfc erf_inv lgamma digamma".split(), 50),
    **dict.fromkeys("sin cos tan".split(), 100),
}
"""Primitives that take more than one instruction of a vector unit -> about how many."""


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


def most_ops_again(one: Instruction, num_bytes: int, read_bytes: int, products: Sequence[Product]) -> float:
    """The most vector ops on each element that kernels of products compute again rather than read what one stored.

    Args:
        one: what they compute.
        num_bytes: of it, before rounding.
        read_bytes: of what it is computed from.
        products: that read it.
    """
    num_others = len(products) - 1
    saved = (num_others + 2) / num_others - read_bytes / max(1, num_bytes)
    if saved <= 0:
        return 0.0
    per_array, besides = MOST_AGAIN[len(one.shape) > 2, num_bytes > 2 * one.num_elements]
    columns = min([min(product.rows, product.columns) for product in products])
    return (per_array * saved + besides) * math.sqrt(max(1, columns / COLUMNS))
