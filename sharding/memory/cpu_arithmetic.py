"""Arithmetic that XLA:CPU rewrites, and the keys for common-subexpression elimination.

A division by a broadcast becomes a product with the broadcast reciprocal. bfloat16 ops are computed in float32 and
rounded, which counts as expensive; a consumer that converts to float32 reads the value before rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import compat
from . import primitive_traits
from .emitter import Emitter
from .instruction import Instruction


def cse_key(eqn: Any, operands: Sequence[Instruction | None], k: int) -> Any:
    """A key that equal equations share, besides their operands; None where equality can't be decided."""
    params = tuple(v for p, v in eqn.params.items() if p not in ("sharding", "out_sharding"))
    literals = tuple(str(a.val) if compat.is_literal(a) else None for a in eqn.invars)
    if any(x is None and not compat.is_literal(a) for a, x in zip(eqn.invars, operands, strict=True)):
        return None
    try:
        hash(params)
    except TypeError:
        return None
    return (params, literals, k)


def divide_by_broadcast(eqn: Any, operands: Sequence[Instruction], value: int | None, emitter: Emitter) -> Instruction:
    """A division by a broadcast, as a product with the broadcast reciprocal."""
    x, broadcast = operands
    is_larger = broadcast.operands and broadcast.operands[0].num_elements < x.num_elements
    small = broadcast.operands[0] if is_larger else broadcast
    itemsize, expensive = x.itemsize, {"elementwise": True, "expensive": True, "eqn": eqn}
    inverse = emitter.emit("div", "fusible", [small], small.shape, itemsize, key="1", **expensive)
    if small is not broadcast:
        shape, key = broadcast.shape, id(broadcast)
        inverse = emitter.emit(
            "broadcast_in_dim", "fusible", [inverse], shape, itemsize, key=key, reuses_operand=True, eqn=eqn
        )
    return emitter.emit(
        "mul", "fusible", [x, inverse], x.shape, itemsize, key="by", elementwise=True, value=value, eqn=eqn
    )


def in_f32(
    eqn: Any, operands: Sequence[Instruction | None], shape: tuple[int, ...], value: int | None, emitter: Emitter
) -> Instruction:
    """An op on bfloat16, computed in float32; a cube is two products, each rounded."""
    name, key = eqn.primitive.name, cse_key(eqn, operands, 0)
    present = [x for x in operands if x is not None]
    facts: dict[str, Any] = {"value": value, "eqn": eqn, "elementwise": True}
    if name == "integer_pow" and eqn.params["y"] == 3:
        present.append(_rounded_op(name, present, shape, ((2,), (None,), 0), facts, emitter))
        name, key = "mul", "cubed"
    expensive = primitive_traits.is_expensive(name, eqn, emitter.traits)
    return _rounded_op(name, present, shape, key, {**facts, "expensive": expensive}, emitter)


def _rounded_op(
    name: str, operands: list[Instruction], shape: tuple[int, ...], key: Any, facts: dict[str, Any], emitter: Emitter
) -> Instruction:
    """An op in float32, rounded to bfloat16."""
    key = None if key is None else (key, "f32")
    return rounded_to_bf16(emitter.emit(name, "fusible", operands, shape, 4, key=key, **facts), emitter)


def rounded_to_bf16(wide: Instruction, emitter: Emitter) -> Instruction:
    """float32 rounded to bfloat16."""
    facts: dict[str, Any] = {"value": wide.value, "eqn": wide.eqn, "elementwise": True, "expensive": True}
    return emitter.emit("convert", "fusible", [wide], wide.shape, 2, key="bf16", **facts)


def widened_to_f32(x: Instruction, emitter: Emitter) -> Instruction:
    """bfloat16 as float32: the value before rounding, unless the program rounds it itself."""
    wide = before_rounding(x) if x.name == "convert" else x
    if wide.itemsize != 2:
        return wide
    return emitter.emit("convert", "fusible", [x], x.shape, 4, key="f32", elementwise=True, value=x.value, eqn=x.eqn)


def before_rounding(x: Instruction) -> Instruction:
    """The float32 value that was rounded to 16 bits; x itself if present is none."""
    is_rounded = x.name in ("convert", "convert_element_type") and x.itemsize == 2 and len(x.operands) == 1
    return x.operands[0] if is_rounded and x.operands[0].itemsize == 4 else x


def is_bf16(eqn: Any) -> bool:
    """Whether an equation's result is bfloat16, in which XLA:CPU does not compute."""
    return str(eqn.outvars[0].aval.dtype) == "bfloat16"


def is_float(eqn: Any) -> bool:
    """Whether an equation's result is a float."""
    return np.dtype(eqn.outvars[0].aval.dtype).kind in "fV"
