"""Operand layouts and dtypes of dots and convolutions in the libraries that XLA:CPU calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import primitive_traits
from .emitter import Emitter
from .instruction import Instruction

MIN_LIBRARY_SIZE = 8
"""Least m, n or k of a dot, whichever is largest, for the library that supports 16-bit floats."""


def runs_in_f32(eqn: Any, operands: Sequence[Instruction]) -> bool:
    """Whether a dot of 16-bit floats runs on operands converted to 32 bits.

    The library that supports 16-bit floats (openxla/xla, `backends/cpu/ynn_support.cc`) takes only dots of two matrices
    (or batches of them), whose left operand contracts its last dim, with no transposed operand. XLA first canonicalises
    a dot with more dims.
    """
    sums, batches = eqn.params["dimension_numbers"]
    rows, columns, contracted = 1, 1, 1
    for k, x in enumerate(operands):
        free = [d for d in range(len(x.shape)) if d not in batches[k] and d not in sums[k]]
        size = math.prod(x.shape[d] for d in free)
        rows, columns = (size, columns) if k == 0 else (rows, size)
        contracted = math.prod(x.shape[d] for d in sums[k])
    if min(rows, columns) == 1 or max(rows, columns, contracted) < MIN_LIBRARY_SIZE:
        return True
    return _is_canonical(eqn) and (
        sums[0][0] != len(operands[0].shape) - 1 or any(primitive_traits.is_transposed(x) for x in operands)
    )


def _is_canonical(eqn: Any) -> bool:
    """Whether a dot is already canonical: batch dims first, one contracting dim and at most one other."""
    sums, batches = eqn.params["dimension_numbers"]
    first = tuple(range(len(batches[0])))
    return (
        tuple(batches[0]) == tuple(batches[1]) == first
        and len(sums[0]) == 1
        and all(len(a.aval.shape) <= len(first) + 2 for a in eqn.invars)
    )


def transposed(x: Instruction, order: Sequence[int], emitter: Emitter) -> Instruction:
    """An array with its dims permuted; itself where only dims of size 1 move."""
    if sorted(d for d in order if x.shape[d] > 1) == [d for d in order if x.shape[d] > 1]:
        return x
    shape = [x.shape[d] for d in order]
    return emitter.emit("transpose", "fusible", [x], shape, x.itemsize, key=tuple(order), value=x.value, eqn=x.eqn)


def dot_operands(eqn: Any, operands: Sequence[Instruction], emitter: Emitter) -> list[Instruction]:
    """The operands of a dot with dims ordered batch, free, contracting (left) and batch, contracting, free (right).

    A single contracting and a single free dim may also be swapped: the library reads a transposed matrix.
    """
    sums, batches = eqn.params["dimension_numbers"]
    stored = []
    for k, x in enumerate(operands):
        batch, contracted = list(batches[k]), list(sums[k])
        free = [d for d in range(len(x.shape)) if d not in batch and d not in contracted]
        order, swapped = [*batch, *free, *contracted], [*batch, *contracted, *free]
        if k == 1:
            order, swapped = swapped, order
        nonunit = [d for d in range(len(x.shape)) if x.shape[d] > 1]
        is_matrix = len(free) == 1 and len(contracted) == 1 and [d for d in swapped if d in nonunit] == nonunit
        stored.append(x if is_matrix else transposed(x, order, emitter))
    return stored


def conv_operands(eqn: Any, operands: Sequence[Instruction], emitter: Emitter) -> list[Instruction]:
    """The operands of a convolution: images with channels last, kernel with output channels last."""
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs = numbers.lhs_spec, numbers.rhs_spec
    orders = [[lhs[0], *lhs[2:], lhs[1]], [*rhs[2:], rhs[1], rhs[0]]]
    return [transposed(x, order, emitter) for x, order in zip(operands, orders, strict=True)]


def conv_order(eqn: Any) -> list[int]:
    """The dims of a convolution's result in the order in which the library writes them."""
    out = eqn.params["dimension_numbers"].out_spec
    return [out[0], *out[2:], out[1]]
