"""Ops on numbers that XLA:CPU computes otherwise than they are written, and when two ops are equal.

A division by what is spread out multiplies by the reciprocal, which is spread out instead. What is written in 16-bit
floats is computed in 32 bits and rounded, which counts as dear; who asks for 32 bits gets them without the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import compat
from . import primitives
from .emitter import Emitter
from .instruction import Instruction


def key_of(eqn: Any, operands: Sequence[Instruction | None], k: int) -> Any:
    """What two equal equations have in common beside their operands; None where that can't be told."""
    params = tuple(v for p, v in eqn.params.items() if p not in ("sharding", "out_sharding"))
    literals = tuple(str(a.val) if compat.is_literal(a) else None for a in eqn.invars)
    if any(x is None and not compat.is_literal(a) for a, x in zip(eqn.invars, operands, strict=True)):
        return None
    try:
        hash(params)
    except TypeError:
        return None
    return (params, literals, k)


def by_reciprocal(eqn: Any, operands: Sequence[Instruction], value: int | None, to: Emitter) -> Instruction:
    """A division by what is spread out."""
    x, spread = operands
    small = spread.operands[0] if spread.operands and spread.operands[0].num_elements < x.num_elements else spread
    width, dear = x.width, {"elementwise": True, "expensive": True, "eqn": eqn}
    inverse = to.emit("div", "loop", [small], small.shape, width, key="1", **dear)
    if small is not spread:
        shape, key = spread.shape, id(spread)
        inverse = to.emit("broadcast_in_dim", "loop", [inverse], shape, width, key=key, reuses=True, eqn=eqn)
    return to.emit("mul", "loop", [x, inverse], x.shape, width, key="by", elementwise=True, value=value, eqn=eqn)


def in_single(
    eqn: Any, operands: Sequence[Instruction | None], shape: tuple[int, ...], value: int | None, to: Emitter
) -> Instruction:
    """An op on 16-bit floats, computed in 32 bits; a cube is two products, of which the first is rounded too."""
    name, key = eqn.primitive.name, key_of(eqn, operands, 0)
    there = [x for x in operands if x is not None]
    facts: dict[str, Any] = {"value": value, "eqn": eqn, "elementwise": True}
    if name == "integer_pow" and eqn.params["y"] == 3:
        there.append(_in_both(name, there, shape, ((2,), (None,), 0), facts, to))
        name, key = "mul", "cubed"
    dear = primitives.is_expensive(name, eqn)
    return _in_both(name, there, shape, key, {**facts, "expensive": dear}, to)


def _in_both(
    name: str, operands: list[Instruction], shape: tuple[int, ...], key: Any, facts: dict[str, Any], to: Emitter
) -> Instruction:
    """An op in 32 bits and what is left of it in 16."""
    key = None if key is None else (key, "single")
    return rounded(to.emit(name, "loop", operands, shape, 4, key=key, **facts), to)


def rounded(wide: Instruction, to: Emitter) -> Instruction:
    """What is left of 32-bit floats in 16 bits."""
    facts: dict[str, Any] = {"value": wide.value, "eqn": wide.eqn, "elementwise": True, "expensive": True}
    return to.emit("convert", "loop", [wide], wide.shape, 2, key="half", **facts)


def widened(x: Instruction, to: Emitter) -> Instruction:
    """16-bit floats in 32 bits: what they were rounded from, unless the program rounds them itself."""
    wide = single(x) if x.name == "convert" else x
    if wide.width != 2:
        return wide
    return to.emit("convert", "loop", [x], x.shape, 4, key="single", elementwise=True, value=x.value, eqn=x.eqn)


def single(x: Instruction) -> Instruction:
    """The 32-bit floats that were rounded to 16 bits; what never had more as it is."""
    rounded = x.name in ("convert", "convert_element_type") and x.width == 2 and len(x.operands) == 1
    return x.operands[0] if rounded and x.operands[0].width == 4 else x


def is_half(eqn: Any) -> bool:
    """Whether an equation's result is of 16-bit floats that XLA:CPU does not compute in."""
    return str(eqn.outvars[0].aval.dtype) == "bfloat16"


def is_float(eqn: Any) -> bool:
    """Whether an equation's result is of floats."""
    return np.dtype(eqn.outvars[0].aval.dtype).kind in "fV"
