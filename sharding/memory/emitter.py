"""Instructions of one body as they are made: equal ones once, and data moved where an op needs it elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..propagation.atoms import AtomTable
from .instruction import Body, Instruction, Phase, Role
from .partition import Cut


class Place:
    """Where in the program instructions are made."""

    phase: Phase = ""


class Emitter:
    """Adds instructions to a body."""

    def __init__(self, table: AtomTable, place: Place):
        self.body = Body()
        self.table = table
        self.at = place
        self._made: dict[Any, Instruction] = {}
        self.carried: set[Instruction] = set()
        """What some loop changes in place."""

    def emit(self, name: str, role: Role, operands: Sequence[Instruction], shape: Sequence[int], width: int,
             *, key: Any = None, **facts: Any) -> Instruction:  # fmt: skip
        """One more instruction; an equal one that is there already if `key` says by what they are equal.

        Args:
            name: of the primitive.
            role: how it is computed.
            operands: what it reads.
            shape: of its result on one device.
            width: bytes of an element.
            key: what else than name, operands and shape it depends on; None where it is never the same.
            facts: further fields of the instruction.
        """
        shape = tuple(shape)
        full = (name, tuple(operands), shape, width, key)
        if key is not None and full in self._made:
            return self._made[full]
        made = Instruction(name, role, list(operands), shape, math.prod(shape) * width, phase=self.at.phase, **facts)
        self.body.instructions.append(made)
        if key is not None:
            self._made[full] = made
        return made

    def argument(self, shape: Sequence[int], width: int, value: int | None) -> Instruction:
        """One more argument of the body."""
        made = self.emit("argument", "argument", [], shape, width, value=value)
        self.body.arguments.append(made)
        return made

    def constant(self, shape: Sequence[int], width: int) -> Instruction:
        """A constant spread out, where an op needs it stored."""
        return self.emit("broadcast", "loop", [], shape, width, key="constant", elementwise=True)

    def parts(
        self, whole: Instruction, shapes: Sequence[tuple[Sequence[int], int, int | None, Any]]
    ) -> list[Instruction]:
        """The results of an instruction that has several: (shape, bytes of an element, value, equation) each."""
        return [
            self.emit(whole.name, "part", [whole], shape, width, value=value, eqn=eqn)
            for shape, width, value, eqn in shapes
        ]

    def local(self, shape: Sequence[int], cut: Cut) -> tuple[int, ...]:
        """The shape on one device, padded as XLA pads."""
        sizes = self.table.sizes
        return tuple(-(-n // math.prod(sizes[a] for a in atoms)) for n, atoms in zip(shape, cut, strict=True))

    def resplit(self, x: Instruction, shape: Sequence[int], width: int, have: Cut, need: Cut) -> Instruction:
        """The same array split otherwise: cut first, then gathered; what changes its dim is exchanged."""
        if have == need:
            return x
        facts: Mapping[str, Any] = {"value": x.value, "eqn": x.eqn}
        kept, moved = _shared(have, need)
        to = {a for atoms in need for a in atoms}
        lost = {a for atoms in have for a in atoms} - to
        if moved:  # along new dims, by an exchange among the devices of the axes that move
            cut = tuple(tuple(a for a in atoms if a in kept or a in moved) for atoms in need)
            parts = self.emit("slice", "loop", [x], self.local(shape, cut), width, key=(have, cut), **facts)
            sent = self.emit("all-to-all", "library", [parts], parts.shape, width, key=(have, cut), **facts)
            x = self.emit("concatenate", "library", [sent], parts.shape, width, key=(have, cut), **facts)
            have = cut
        elif lost and (to - {a for atoms in have for a in atoms}):
            cut = tuple(h if need[d][: len(h)] != h else need[d] for d, h in enumerate(have))
            if cut != have:
                x = self.emit("slice", "loop", [x], self.local(shape, cut), width, key=(have, cut), **facts)
                have = cut
        for d, (h, n) in enumerate(zip(have, need, strict=True)):
            common = _prefix(h, n)
            if len(h) > len(common):
                after = (*have[:d], common, *have[d + 1 :])
                x = self.gather(x, shape, width, d, have, after)
                have = after
        if have != need:
            x = self.emit("slice", "loop", [x], self.local(shape, need), width, key=(have, need), **facts)
        return x

    def gather(self, x: Instruction, shape: Sequence[int], width: int, d: int, have: Cut, need: Cut) -> Instruction:
        """An all-gather along one dim; XLA:CPU gathers along the outermost, else it copies before and after."""
        facts: Mapping[str, Any] = {"value": x.value, "eqn": x.eqn}
        inner = math.prod(self.local(shape, have)[:d]) > 1
        if inner:
            x = self.emit("transpose", "loop", [x], self.local(shape, have), width, key=("to", d), **facts)
        full = self.local(shape, need)
        x = self.emit("all-gather", "library", [x], full, width, key=(have, need), **facts)
        return self.emit("transpose", "loop", [x], full, width, key=("from", d), **facts) if inner else x

    def summed(self, x: Instruction, width: int, atoms: Sequence[int]) -> Instruction:
        """The sum over devices of what each has; 16-bit floats are summed as 32-bit ones."""
        facts: Mapping[str, Any] = {"value": x.value, "eqn": x.eqn}
        group = (tuple(sorted(atoms)), width)
        if width != 2:
            return self.emit("all-reduce", "library", [x], x.shape, width, group=group, **facts)
        group = (group[0], 4)
        x = self.emit("convert", "loop", [x], x.shape, 4, elementwise=True, **facts)
        x = self.emit("all-reduce", "library", [x], x.shape, 4, group=group, **facts)
        return self.emit("convert", "loop", [x], x.shape, width, elementwise=True, expensive=True, **facts)


def _prefix(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return tuple(a[:n])


def _shared(have: Cut, need: Cut) -> tuple[set[int], set[int]]:
    """The atoms that split one dim before and after, and those that move to another."""
    kept = {a for h, n in zip(have, need, strict=True) for a in h if a in n}
    return kept, {a for h in have for a in h} & {a for n in need for a in n} - kept
