"""An equation on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .emitter import Emitter
from .instruction import Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOp:
    """An equation with one result, on one device."""

    eqn: Any
    operands: Sequence[Instruction]
    """Those that are not constants."""
    shape: tuple[int, ...]
    itemsize: float
    facts: Mapping[str, Any]
    """Of the instruction that makes the result; see `Emitter.emit`."""
    emitter: Emitter

    def emit(self, name: str, operands: Sequence[Instruction], **more: Any) -> Instruction:
        """The instruction that makes the result."""
        facts = {"role": "fusible", **self.facts, **more}
        return self.emitter.emit(name, operands=operands, shape=self.shape, itemsize=self.itemsize, **facts)
