"""Instructions of one body as they are made: equal ones once, and data moved where an op needs it elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..reshard import Step, chain
from ..spec import Axis, Spec, local_shape
from .instruction import Body, Instruction, Phase, Role


class Place:
    """Where in the program instructions are made."""

    phase: Phase = ""


class Emitter:
    """Adds instructions to a body."""

    def __init__(self, sizes: Mapping[str, int], place: Place, *, permutes: bool = True):
        self.body = Body()
        self.sizes = sizes
        self.permutes = permutes
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

    def local(self, shape: Sequence[int], spec: Spec) -> tuple[int, ...]:
        """The shape on one device, padded as XLA pads."""
        return local_shape(spec.axes, shape, self.sizes)

    def resplit(self, x: Instruction, shape: Sequence[int], width: int, have: Spec, need: Spec) -> Instruction:
        """The same array split otherwise, by the cheapest way."""
        if have.axes == need.axes:
            return x
        return self.walked(x, shape, width, chain(have, need, tuple(shape), width, self.sizes, permutes=self.permutes))

    def walked(self, x: Instruction, shape: Sequence[int], width: int, steps: Sequence[Step]) -> Instruction:
        """The same array behind some steps."""
        for step in steps:
            x = self.behind(x, self.local(shape, step.spec), width, step)
        return x

    def behind(self, x: Instruction, shape: tuple[int, ...], width: int, step: Step) -> Instruction:
        """One step: the array that is there when it is done.

        An exchange takes parts that it gets ready and puts together; a sum that is scattered is summed up whole
        first, and one of parts is cut first.
        """
        key, facts = step.spec.axes, {"value": x.value, "eqn": x.eqn}
        if step.kind == "all-gather":
            grown = [d for d, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m]
            return self.gather(x, shape, width, grown[0] if grown else 0)
        if step.kind == "collective-permute":
            return self.emit(step.kind, "library", [x], shape, width, key=key, **facts)
        if step.kind == "all-to-all":
            parts = self.emit("slice", "loop", [x], shape, width, key=key, **facts)
            sent = self.emit(step.kind, "library", [parts], shape, width, key=key, **facts)
            return self.emit("concatenate", "library", [sent], shape, width, key=key, **facts)
        if step.kind == "reduce-scatter":
            x = self.summed(x, width, step.axes)
        if x.shape != shape:
            x = self.emit("slice", "loop", [x], shape, width, key=key, **facts)
        return self.summed(x, width, step.axes) if step.kind == "all-reduce" else x

    def gather(self, x: Instruction, shape: tuple[int, ...], width: int, d: int) -> Instruction:
        """An all-gather along one dim; XLA:CPU gathers along the outermost, else it copies before and after."""
        facts: Mapping[str, Any] = {"value": x.value, "eqn": x.eqn}
        inner = math.prod(x.shape[:d]) > 1
        if inner:
            x = self.emit("transpose", "loop", [x], x.shape, width, key=("to", d), **facts)
        x = self.emit("all-gather", "library", [x], shape, width, key=d, **facts)
        return self.emit("transpose", "loop", [x], shape, width, key=("from", d), **facts) if inner else x

    def summed(self, x: Instruction, width: int, axes: tuple[Axis, ...]) -> Instruction:
        """The sum over devices of what each has; 16-bit floats are summed as 32-bit ones."""
        facts: Mapping[str, Any] = {"value": x.value, "eqn": x.eqn}
        group = (axes, width)
        if width != 2:
            return self.emit("all-reduce", "library", [x], x.shape, width, group=group, **facts)
        group = (group[0], 4)
        x = self.emit("convert", "loop", [x], x.shape, 4, elementwise=True, **facts)
        x = self.emit("all-reduce", "library", [x], x.shape, 4, group=group, **facts)
        return self.emit("convert", "loop", [x], x.shape, width, elementwise=True, expensive=True, **facts)
