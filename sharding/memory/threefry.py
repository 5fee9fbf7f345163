"""Random bits from threefry keys: two words per element, which each reader combines.

JAX lowers them to a loop over rounds on CPUs, whose carries are copied, and on GPUs to a library call, whose operands
are stored: the counters and the keys of all elements (jax, `_src/prng.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from .emitter import Emitter
from .instruction import Instruction

WORD_BYTES = 4


def makes_bits(eqn: Any) -> bool:
    """Whether an equation makes random bits from threefry keys."""
    return eqn.primitive.name == "random_bits" and compat.is_threefry(eqn.invars[0].aval.dtype)


def random_bits(
    eqn: Any,
    keys: Sequence[Instruction],
    shape: tuple[int, ...],
    itemsize: int,
    value: int | None,
    emitter: Emitter,
) -> Instruction:
    """The instructions of a `random_bits` equation."""
    stored = [
        emitter.emit("broadcast", "unfusible", [], shape, WORD_BYTES, value=value, eqn=eqn)
        for _ in range(emitter.traits.stored_threefry_operands)
    ]
    call = emitter.emit("threefry2x32", "unfusible", [*keys, *stored], (0,), 1, eqn=eqn)
    words = emitter.tuple_elements(call, [(shape, WORD_BYTES, value, eqn)] * 2)
    return emitter.emit("xor", "fusible", words, shape, itemsize, elementwise=True, value=value, eqn=eqn)
