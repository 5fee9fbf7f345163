"""Operands of dots and convolutions transposed to the order of dims that a library takes, as on XLA:CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .emitter import Emitter
from .instruction import Instruction


def transposed(x: Instruction, order: Sequence[int], emitter: Emitter) -> Instruction:
    """An array with its dims permuted; itself where only dims of size 1 move."""
    if sorted(d for d in order if x.shape[d] > 1) == [d for d in order if x.shape[d] > 1]:
        return x
    shape = [x.shape[d] for d in order]
    return emitter.emit("transpose", "fusible", [x], shape, x.itemsize, key=tuple(order), value=x.value, eqn=x.eqn)


def is_swapped(eqn: Any, lhs: Instruction) -> bool:
    """Whether the library reads the left operand of a dot with its single contracting dim before its free one."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    others = [d for d in range(len(lhs.shape)) if d not in batch and lhs.shape[d] > 1]
    return len(others) == 2 and others[0] in contracted and others[1] not in contracted


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
