"""Matrix products on one device: their sizes, and the types of what they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..cost.gpu_latencies import Product
from .emitter import Emitter, before_rounding
from .instruction import Instruction
from .primitive_traits import element_bytes


def matrix_product(eqn: Any, operands: Sequence[Instruction], itemsize: float) -> Product | None:
    """The sizes of a `dot_general` on one device; None where an operand is a constant."""
    if len(operands) != 2:
        return None
    summed, batch = eqn.params["dimension_numbers"]
    left, right = operands
    num_summed, num_batch = (math.prod(left.shape[d] for d in dims[0]) for dims in (summed, batch))
    each = num_summed * num_batch
    return Product(
        batch=num_batch,
        rows=left.num_elements // max(1, each),
        columns=right.num_elements // max(1, each),
        summed=num_summed,
        operand_itemsize=math.ceil(min(left.itemsize, right.itemsize)),
        itemsize=math.ceil(itemsize),
        is_reshaped=any(len(x.shape) > 2 + bool(batch[0]) for x in operands) or len(batch[0]) > 1,
    )


def of_one_type(eqn: Any, operands: Sequence[Instruction], emitter: Emitter) -> list[Instruction]:
    """The operands of a `dot_general`; where their types differ, JAX converts them to the result's.

    Not two 8-bit floats, and on TPUs only what is multiplied with complex numbers.
    """
    types = [atom.aval.dtype for atom in eqn.invars]
    has_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in types)
    are_8_bits = all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1 for dtype in types)
    is_mixed = types[0] != types[1] and not are_8_bits and (has_complex or not emitter.traits.multiplies_mixed)
    if len(operands) != 2 or not is_mixed:
        return [*operands]
    result = eqn.outvars[0].aval.dtype
    return [
        x if dtype == result else converted(x, element_bytes(result), emitter)
        for x, dtype in zip(operands, types, strict=True)
    ]


def converted(x: Instruction, itemsize: float, emitter: Emitter) -> Instruction:
    """An operand in the type that a product has; its value before rounding, if it was rounded from that."""
    wide = before_rounding(x)
    if wide is not x and itemsize == wide.itemsize:
        return wide
    facts = {"key": ("converted", itemsize), "value": x.value, "eqn": x.eqn, "elementwise": True}
    return emitter.emit("convert_element_type", "fusible", [x], x.shape, itemsize, **facts)
