"""Where XLA:TPU stores what products read and make in 16 bits, and where in 32."""

from __future__ import annotations

import jax.numpy as jnp

from .fusion import stored_for_several
from .instruction import Body, Instruction, users
from .primitive_traits import REDUCTIONS
from .product_ends import is_product, product_ends
from .tile_layouts import rounds


def settle_rounding(body: Body) -> None:
    """Stores once what is rounded for products of many matrices, whose kernels compute no operands.

    Products, and what is computed element by element, are stored in 16 bits if only other products and reductions read
    them: the kernel computes the reductions, and products round what they read.
    """
    readers = users(body.instructions)
    for one in body.instructions:
        for inner in one.bodies:
            settle_rounding(inner)
        reading = readers[one]
        if one.name == "convert_element_type" and one.itemsize == 2:
            one.expensive = any(x.product is not None and x.product.batch > 1 for x in reading)
    reduced, results = set[Instruction](), set(body.results)
    for one in reversed(body.instructions):
        is_inside = one.elementwise and one not in results
        if one.name in REDUCTIONS or (is_inside and readers[one] and reduced.issuperset(readers[one])):
            reduced.add(one)
    ends = product_ends(body.instructions, readers, results)
    for one in stored_for_several(body.instructions, body.results, body.traits):
        if one in results or not _is_wide(one) or any(x.role == "bitcast" for x in ends.get(one, ())):
            continue
        others = [x for x in readers[one] if not (is_product(x) and rounds(x))]
        if 0 < len(others) < len(readers[one]) and reduced.issuperset(others):
            one.num_bytes //= 2


def _is_wide(one: Instruction) -> bool:
    """Whether it is of 32-bit floats."""
    return one.itemsize == 4 and one.eqn is not None and one.eqn.outvars[0].aval.dtype == jnp.float32
