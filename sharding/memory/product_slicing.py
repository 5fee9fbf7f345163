"""Products of which only a slice is read: accelerators compute no more than that.

XLA:TPU moves the slice into the product or its operand, XLA:GPU into its kernel, with the ops on each element between.
"""

from __future__ import annotations

import dataclasses

from ..cost.gpu_latencies import Product
from .fusion import is_widened
from .instruction import Body, Instruction, Users, array_bytes, users
from .primitive_traits import strided_dims


def slice_products(body: Body) -> None:
    """Rewrite a body, its loops and its branches."""
    readers, results = users(body.instructions), {*body.results}
    made: dict[Instruction, Instruction] = {}
    """Slice -> what computes it alone."""
    for one in body.instructions:
        for inner in one.bodies:
            slice_products(inner)
        one.operands = [made.get(x, x) for x in one.operands]
        if _is_contiguous(one):
            chain = _chain(one, readers, results, only_widened=body.traits.fuses_into_products)
            if chain:
                _shrink(chain, one)
                made[one] = chain[0]
    body.results = [made.get(x, x) for x in body.results]


def _is_contiguous(one: Instruction) -> bool:
    """Whether it is a slice of the program, each of whose dims is read without gaps."""
    is_own = one.name == "slice" and one.eqn is not None and one.eqn.primitive.name == "slice"
    return is_own and not one.axes and not strided_dims(one.eqn)


def _chain(part: Instruction, readers: Users, results: set[Instruction], *, only_widened: bool) -> list[Instruction]:
    """What only a slice reads: ops on each element, the last one first, and the product that is the first one.

    Args:
        part: the slice.
        readers: of each instruction.
        results: of the body.
        only_widened: whether no ops are passed but those that widen 16 bits.
    """
    found, one = [], part.operands[0]
    while len(readers[one]) == 1 and one not in results:
        found.append(one)
        if one.role == "unfusible":
            is_product = one.name == "dot_general" or (one.name == "conv_general_dilated" and one.fuses_operands)
            return found if is_product else []
        if len(one.operands) != 1 or one.shape != one.operands[0].shape:
            break
        if not (is_widened(one) if only_widened else one.elementwise):
            break
        one = one.operands[0]
    return []


def _shrink(chain: list[Instruction], part: Instruction) -> None:
    """Gives the instructions of a chain the shape of a slice."""
    product = chain[-1]
    if product.product is not None:
        product.product = _sliced(product.product, product, part)
    for one in chain:
        one.shape, one.num_bytes = part.shape, array_bytes(part.num_elements, one.itemsize)


def _sliced(whole: Product, one: Instruction, part: Instruction) -> Product:
    """The sizes of a product that makes a part of what another one makes."""
    (summed, _), (batch, _) = one.eqn.params["dimension_numbers"]
    first_row = len(batch)
    first_column = len(one.eqn.invars[0].aval.shape) - len(summed)
    sizes = {"batch": whole.batch, "rows": whole.rows, "columns": whole.columns}
    for d, (size, large) in enumerate(zip(part.shape, one.shape, strict=True)):
        name = "batch" if d < first_row else "rows" if d < first_column else "columns"
        sizes[name] = sizes[name] * size // max(1, large)
    return dataclasses.replace(whole, **sizes)
