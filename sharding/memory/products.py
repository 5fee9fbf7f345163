"""Dots and convolutions, whose operands are stored with their dims in the order that XLA:CPU's libraries take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import primitives
from .emitter import Emitter
from .instruction import Instruction

LEAST = 8
"""Of the largest of a dot's three sizes, for the library that knows 16-bit floats."""


def runs_in_single(eqn: Any, operands: Sequence[Instruction]) -> bool:
    """Whether a dot of 16-bit floats runs on operands converted to 32 bits.

    The library that knows 16-bit floats (openxla/xla, `backends/cpu/ynn_support.cc`) is not asked for a dot that
    isn't of two matrices (or batches of them), nor for one whose left operand isn't summed along its last dim, nor
    for what lies as a transposition left it. XLA brings a dot of more dims into that form before.
    """
    sums, batches = eqn.params["dimension_numbers"]
    rows, columns, summed = 1, 1, 1
    for k, x in enumerate(operands):
        free = [d for d in range(len(x.shape)) if d not in batches[k] and d not in sums[k]]
        size = math.prod(x.shape[d] for d in free)
        rows, columns = (size, columns) if k == 0 else (rows, size)
        summed = math.prod(x.shape[d] for d in sums[k])
    if min(rows, columns) == 1 or max(rows, columns, summed) < LEAST:
        return True
    return _is_written_for_library(eqn) and (
        sums[0][0] != len(operands[0].shape) - 1 or any(primitives.is_transposed(x) for x in operands)
    )


def _is_written_for_library(eqn: Any) -> bool:
    """Whether XLA leaves a dot's dims as they are: batch dims first, one summed and at most one other."""
    sums, batches = eqn.params["dimension_numbers"]
    first = tuple(range(len(batches[0])))
    return (
        tuple(batches[0]) == tuple(batches[1]) == first
        and len(sums[0]) == 1
        and all(len(a.aval.shape) <= len(first) + 2 for a in eqn.invars)
    )


def ordered(x: Instruction, order: Sequence[int], to: Emitter) -> Instruction:
    """An array with its dims in another order; itself where only dims of one element move."""
    if sorted(d for d in order if x.shape[d] > 1) == [d for d in order if x.shape[d] > 1]:
        return x
    shape = [x.shape[d] for d in order]
    return to.emit("transpose", "loop", [x], shape, x.width, key=tuple(order), value=x.value, eqn=x.eqn)


def dot_operands(eqn: Any, operands: Sequence[Instruction], to: Emitter) -> list[Instruction]:
    """The operands of a dot with their dims in the order batch, free, summed and batch, summed, free.

    One summed and one free dim may also come the other way round: the library reads such an operand as it is.
    """
    sums, batches = eqn.params["dimension_numbers"]
    stored = []
    for k, x in enumerate(operands):
        batch, summed = list(batches[k]), list(sums[k])
        free = [d for d in range(len(x.shape)) if d not in batch and d not in summed]
        order, swapped = [*batch, *free, *summed], [*batch, *summed, *free]
        if k == 1:
            order, swapped = swapped, order
        wide = [d for d in range(len(x.shape)) if x.shape[d] > 1]
        as_it_is = len(free) == 1 and len(summed) == 1 and [d for d in swapped if d in wide] == wide
        stored.append(x if as_it_is else ordered(x, order, to))
    return stored


def conv_operands(eqn: Any, operands: Sequence[Instruction], to: Emitter) -> list[Instruction]:
    """Images with their channels last, and a kernel with its outputs last."""
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs = numbers.lhs_spec, numbers.rhs_spec
    orders = [[lhs[0], *lhs[2:], lhs[1]], [*rhs[2:], rhs[1], rhs[0]]]
    return [ordered(x, order, to) for x, order in zip(operands, orders, strict=True)]


def conv_order(eqn: Any) -> list[int]:
    """The dims of a convolution's result in the order in which the library makes them."""
    out = eqn.params["dimension_numbers"].out_spec
    return [out[0], *out[2:], out[1]]
