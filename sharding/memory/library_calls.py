"""Dots and convolutions that a library runs, and 16-bit floats computed in 32 bits, as on XLA:CPU.

The library takes operands with dims ordered batch, free, contracting (left) and batch, contracting, free (right), where
it may read a matrix transposed; images with channels last, and kernels with output channels last. An op of 16-bit
floats is computed in float32 and rounded, which counts as expensive; a consumer that converts to float32 reads the
value before rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .compiler_traits import CompilerTraits
from .emitter import Emitter, before_rounding
from .instruction import Instruction
from .local_op import LocalOp
from .primitive_traits import CONVERSIONS

MIN_LIBRARY_SIZE = 8
"""The library multiplies matrices of bfloat16 with one size, free or summed, of at least as much."""


def library_call(op: LocalOp) -> Instruction:
    """A dot or a convolution."""
    eqn, operands, shape, itemsize, emitter = op.eqn, op.operands, op.shape, op.itemsize, op.emitter
    name, traits = eqn.primitive.name, emitter.traits
    is_half, wide = itemsize == 2, is_computed_in_f32(eqn, traits)
    if name == "dot_general":
        sources, orders, is_turned = _dot_orders(eqn, operands)
        order = [*range(len(shape))]
        reads_half = traits.widens_16_bits and eqn.invars[0].aval.dtype == eqn.invars[1].aval.dtype == jnp.bfloat16
        wide = reads_half and (is_turned or not (traits.multiplies_16_bits and _multiplies_16_bits(eqn, operands)))
        operands = sources
    else:
        numbers = eqn.params["dimension_numbers"]
        lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        orders, order = [[lhs[0], *lhs[2:], lhs[1]], [*rhs[2:], rhs[1], rhs[0]]], [out[0], *out[2:], out[1]]
    stored = [
        emitter.transposed(emitter.widened(x) if wide else x, dims) for x, dims in zip(operands, orders, strict=True)
    ]
    made = emitter.emit(name, "unfusible", stored, [shape[d] for d in order], 4 if wide else itemsize, **op.facts)
    made = emitter.rounded(made) if wide and is_half else made
    return emitter.transposed(made, [order.index(d) for d in range(len(order))])


def _dot_orders(eqn: Any, operands: Sequence[Instruction]) -> tuple[list[Instruction], list[list[int]], bool]:
    """What a dot reads, the order of dims of each, and whether the left one is read transposed.

    It reads a matrix before a transpose of the program (openxla/xla, `service/transpose_folding.cc`).
    """
    sources, found, is_turned = [], [], False
    for k, (x, *dims) in enumerate(zip(operands, *eqn.params["dimension_numbers"], strict=True)):
        summed, batch = map(list, dims)
        free = [d for d in range(len(x.shape)) if d not in batch and d not in summed]
        order, turned = [*batch, *free, *summed], [*batch, *summed, *free]
        if k == 1:
            order, turned = turned, order
        is_matrix = len(free) == len(summed) == 1
        source, places = _before_transpose(x)
        if is_matrix and source is not x and all(places[d] == d for d in batch):
            x, order, turned = source, [places[d] for d in order], [places[d] for d in turned]
        can_turn = is_matrix and x.is_in_order(turned) and not x.is_in_order(order)
        is_turned = is_turned or (can_turn and k == 0)
        sources.append(x)
        found.append(turned if can_turn else order)
    return sources, found, is_turned


def _multiplies_16_bits(eqn: Any, operands: Sequence[Instruction]) -> bool:
    """Whether the library multiplies matrices of bfloat16 as they are (openxla/xla, `backends/cpu/ynn_support.cc`).

    It wants neither vectors nor tiny matrices. XLA:CPU moves a transpose of the program into the dot, where nothing
    else reshapes its operands, and the library does not take the order that results.
    """
    sizes, plain = [], True
    for x, summed, batch in zip(operands, *eqn.params["dimension_numbers"], strict=True):
        free = [size for d, size in enumerate(x.shape) if d not in (*summed, *batch)]
        sizes.append(math.prod(free))
        plain = plain and sum(size > 1 for size in free) == 1 == len(summed)
    summed = math.prod(operands[0].shape[d] for d in eqn.params["dimension_numbers"][0][0])
    if 1 in sizes or max(*sizes, summed) < MIN_LIBRARY_SIZE:
        return False
    return not (plain and any(_is_transposed(x) for x in operands))


def _is_transposed(x: Instruction) -> bool:
    """Whether the program transposes it, before ops on each element."""
    while x.name != "transpose" and x.elementwise and len(x.operands) == 1:
        x = x.operands[0]
    source, places = _before_transpose(x)
    return not source.is_in_order(places)


def _before_transpose(x: Instruction) -> tuple[Instruction, Sequence[int]]:
    """What transposes of the program read, and which of its dims is which of the result's; `x` itself if only dims of
    size 1 move."""
    source, places = x, [*range(len(x.shape))]
    while source.operands and (permutation := _permutation(source)) is not None:  # a constant has no operands
        source, places = source.operands[0], [permutation[d] for d in places]
    is_moved = places == sorted(places) or not source.is_in_order(places)
    return (source, places) if is_moved else (x, range(len(x.shape)))


def _permutation(x: Instruction) -> Sequence[int] | None:
    """How the program transposes; None if it does not."""
    if x.name != "transpose" or x.eqn is None or x.eqn.primitive.name != "transpose":
        return None
    return x.eqn.params["permutation"]


def is_computed_in_f32(eqn: Any, traits: CompilerTraits) -> bool:
    """Whether an equation of bfloat16 arithmetic runs in float32."""
    is_half = traits.widens_16_bits and eqn.outvars[0].aval.dtype == jnp.bfloat16
    return is_half and eqn.primitive.name not in CONVERSIONS


def arithmetic(
    name: str,
    operands: Sequence[Instruction],
    shape: Sequence[int],
    itemsize: float,
    emitter: Emitter,
    *,
    eqn: Any,
    **facts: Any,
) -> Instruction:
    """An elementwise op; of bfloat16 in float32, where that is what runs."""
    if not is_computed_in_f32(eqn, emitter.traits):
        return emitter.emit(name, "fusible", operands, shape, itemsize, eqn=eqn, **facts)
    wide = [emitter.in_32_bits(x) for x in operands]
    return emitter.rounded(emitter.emit(name, "fusible", wide, shape, 4, eqn=eqn, **facts))


def kept_rounded(x: Instruction, emitter: Emitter) -> Instruction:
    """Its operand, whose rounding XLA keeps: a sharding constraint stands between it and what reads it."""
    if before_rounding(x) is x:
        return x
    return emitter.emit("sharding_constraint", "bitcast", [x], x.shape, 2, key="bitcast", value=x.value, eqn=x.eqn)
