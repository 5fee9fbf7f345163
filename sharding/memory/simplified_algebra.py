"""Ops that XLA's algebraic simplifier replaces, so that other arrays are stored.

A product that contracts nothing multiplies broadcasts, and on accelerators a product with a vector is a reduction: both
fuse. An array added to what is scattered into zeros is scattered into itself (openxla/xla,
`hlo/transforms/simplifiers/algebraic_simplifier.cc`, `dot_strength_reduction`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .emitter import Emitter
from .instruction import Instruction


def product(
    eqn: Any,
    operands: Sequence[Instruction],
    shape: Sequence[int],
    itemsize: int,
    facts: dict[str, Any],
    emitter: Emitter,
) -> Instruction | None:
    """A `dot_general` as elementwise ops, and a reduction; None where XLA keeps it."""
    if len(operands) < 2:
        return None
    sums, batches = eqn.params["dimension_numbers"]
    if math.prod(operands[0].shape[d] for d in sums[0]) == 1:
        return emitter.emit("mul", "fusible", operands, shape, itemsize, **facts)
    free = [math.prod(n for d, n in enumerate(x.shape) if d not in (*sums[k], *batches[k]))
            for k, x in enumerate(operands)]  # fmt: skip
    if not emitter.traits.reduces_vector_products or min(free) > 1:
        return None
    larger = max(operands, key=lambda x: x.num_elements)
    terms = emitter.emit("mul", "fusible", operands, larger.shape, itemsize, **facts)
    return emitter.emit("reduce_sum", "fusible", [terms], shape, itemsize, **facts, expensive=True)


def scattered_sum(
    eqn: Any, operands: Sequence[Instruction], facts: dict[str, Any], emitter: Emitter
) -> Instruction | None:
    """A sum with what is scattered into zeros, scattered into the other operand; None for other sums."""
    if eqn.primitive.name not in ("add", "add_any") or len(operands) != 2:
        return None
    for k, x in enumerate(operands):
        other = operands[1 - k]
        if x.name == "scatter-add" and _is_constant(x.operands[0]) and other.num_bytes == x.num_bytes:
            return emitter.emit(
                x.name, x.role, [other, *x.operands[1:]], x.shape, x.itemsize, in_place=((0, 0),), **facts
            )
    return None


def _is_constant(x: Instruction) -> bool:
    return x.name == "broadcast" and not x.operands
