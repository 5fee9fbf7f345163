"""16-bit floats where a compiler computes them in 32 bits, as XLA:CPU does.

Each op is computed in float32 and rounded, which counts as expensive; a consumer that converts to float32 reads the
value before rounding.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .compiler_traits import CompilerTraits
from .emitter import Emitter
from .instruction import Instruction
from .primitive_traits import CONVERSIONS


def is_computed_in_f32(eqn: Any, traits: CompilerTraits) -> bool:
    """Whether an equation of bfloat16 arithmetic runs in float32."""
    is_half = traits.widens_16_bits and eqn.outvars[0].aval.dtype == jnp.bfloat16
    return is_half and eqn.primitive.name not in CONVERSIONS


def rounded(wide: Instruction, emitter: Emitter) -> Instruction:
    """float32 rounded to 16 bits."""
    facts: dict[str, Any] = {"value": wide.value, "eqn": wide.eqn, "elementwise": True, "expensive": True}
    return emitter.emit("convert", "fusible", [wide], wide.shape, 2, key="16", **facts)


def widened(x: Instruction, emitter: Emitter) -> Instruction:
    """16 bits as float32: the value before rounding, unless the program rounds it itself."""
    wide = before_rounding(x) if x.name == "convert" else x
    if wide.itemsize != 2:
        return wide
    return emitter.emit("convert", "fusible", [x], x.shape, 4, key="32", elementwise=True, value=x.value, eqn=x.eqn)


def before_rounding(x: Instruction) -> Instruction:
    """The float32 value that was rounded to 16 bits; x itself if there is none."""
    is_rounded = x.name in ("convert", "convert_element_type") and x.itemsize == 2 and len(x.operands) == 1
    return x.operands[0] if is_rounded and x.operands[0].itemsize == 4 else x
