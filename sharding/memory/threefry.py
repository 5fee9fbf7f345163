"""Random bits from threefry keys.

On CPUs JAX lowers them to a loop over rounds: its two words per element are stored, copied as it starts, and combined
by each reader. Elsewhere they are made, once, in the kernel of the op that reads them
(jax, `_src/random/threefry2x32.py`).
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
    if not emitter.traits.loops_over_threefry_rounds:
        facts: dict[str, Any] = {"expensive": True, "value": value, "eqn": eqn}
        return emitter.emit("threefry2x32", "fusible", keys, shape, itemsize, **facts)
    counters = [emitter.emit("broadcast", "unfusible", [], shape, WORD_BYTES, value=value, eqn=eqn) for _ in range(2)]
    call = emitter.emit("threefry2x32", "unfusible", [*keys, *counters], (0,), 1, eqn=eqn)
    words = emitter.tuple_elements(call, [(shape, WORD_BYTES, value, eqn)] * 2)
    return emitter.emit("xor", "fusible", words, shape, itemsize, elementwise=True, value=value, eqn=eqn)
