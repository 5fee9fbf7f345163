"""Trip counts of HLO while loops.

XLA:CPU and XLA:GPU annotate `known_trip_count` where they know it; XLA:TPU never does. There it is derived from the
loop: a condition that compares two induction variables or constants, each a constant plus an element of the loop
state, where the elements start as constants and the body adds a constant, as in `lax.scan` and windowed einsums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from .hlo import Instruction, Module


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """The trip count of a `while` instruction; None if the HLO doesn't determine it.

    Args:
        module: the program.
        computation: name of the computation with the loop.
        loop: the instruction.
    """
    known = loop.attribute(r'known_trip_count":\{"n":"(\d+)"')
    if known:
        return int(known)
    condition, body = loop.attribute(r"condition=%([\w.\-]+)"), loop.attribute(_BODY)
    comparison = _comparison(module, condition)
    if comparison is None:
        return None
    left, right = (_start_and_step(module, side, body, computation, loop.operands[0]) for side in comparison[:2])
    if left is None or right is None:
        return None
    return _count(left[0] - right[0], left[1] - right[1], comparison[2])


_BODY = r"body=%([\w.\-]+)"


class _Affine(NamedTuple):
    """A constant, plus an element of the loop state unless `element` is None."""

    element: int | None
    constant: int


class _LoopState(NamedTuple):
    """The state tuple of a loop."""

    outer: tuple[str, Instruction] | None
    """None for the loop itself; for an enclosing loop, its computation and instruction."""


_Value: TypeAlias = "_Affine | _LoopState | tuple[_Value, ...] | None"
_Arguments: TypeAlias = "Sequence[_Value] | None"
_INSIDE: _Arguments = (_LoopState(None),)
_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "opt-barrier")


def _value(module: Module, computation: str, name: str, arguments: _Arguments) -> _Value:
    """The value of an instruction; None if it is neither a constant nor affine in the loop state.

    Args:
        module: the program.
        computation: name of the instruction's computation.
        name: of the instruction.
        arguments: of the computation; None: those of its caller, if it has only one.
    """
    line = module.computations[computation].get(name)
    if line is None:
        return None

    def operand(i: int) -> _Value:
        return _value(module, computation, line.operands[i], arguments)

    if line.opcode == "constant":
        return _Affine(None, int(line.literal)) if line.literal.lstrip("-").isdigit() else None
    if line.opcode == "parameter":
        number = int(line.literal)
        return _argument(module, computation, number) if arguments is None else arguments[number]
    if line.opcode in _SAME:
        return operand(0)
    if line.opcode == "get-tuple-element":
        return _element(module, operand(0), int(line.attribute(r"index=(\d+)")))
    if line.opcode == "tuple":
        return tuple(operand(i) for i in range(len(line.operands)))
    if line.opcode in ("add", "subtract"):
        return _sum(operand(0), operand(1), 1 if line.opcode == "add" else -1)
    if line.opcode in ("fusion", "call"):
        callee = line.attribute(r"(?:calls|to_apply)=%([\w.\-]+)")
        inner = [operand(i) for i in range(len(line.operands))]
        return _value(module, callee, module.root(callee).name, inner)
    return None


def _argument(module: Module, computation: str, number: int) -> _Value:
    """A computation's argument at its only call site; None if there are several."""
    callers = [
        (name, line)
        for name, lines in module.computations.items()
        for line in lines.values()
        if f"%{computation}" in line.attributes and any(callee == computation for _, callee in line.called())
    ]
    if len(callers) != 1:
        return None
    name, line = callers[0]
    if line.opcode == "while":
        return _LoopState(callers[0])
    return _value(module, name, line.operands[number], None) if line.opcode in ("call", "fusion") else None


def _element(module: Module, value: _Value, index: int) -> _Value:
    """An element of a tuple; of an enclosing loop's state only if that loop leaves it unchanged."""
    if isinstance(value, _Affine) or value is None:
        return None
    if not isinstance(value, _LoopState):
        return value[index]
    if value.outer is None:
        return _Affine(index, 0)
    computation, loop = value.outer
    body = loop.attribute(_BODY)
    after = _tuple_element(module, body, module.root(body).name, index, _INSIDE)
    return _tuple_element(module, computation, loop.operands[0], index, None) if after == _Affine(index, 0) else None


def _sum(a: _Value, b: _Value, sign: int) -> _Value:
    if not isinstance(a, _Affine) or not isinstance(b, _Affine):
        return None
    if b.element is not None and (sign < 0 or a.element is not None):
        return None
    return _Affine(b.element if a.element is None else a.element, a.constant + sign * b.constant)


def _comparison(module: Module, condition: str) -> tuple[_Affine, _Affine, str] | None:
    """Both sides and the direction of a condition's comparison."""
    computation, line, arguments = condition, module.root(condition), _INSIDE
    while line.opcode in ("fusion", "call"):
        inner = [_value(module, computation, name, arguments) for name in line.operands]
        computation, arguments = line.attribute(r"(?:calls|to_apply)=%([\w.\-]+)"), inner
        line = module.root(computation)
    if line.opcode != "compare":
        return None
    left, right = (_value(module, computation, name, arguments) for name in line.operands)
    if not isinstance(left, _Affine) or not isinstance(right, _Affine):
        return None
    return left, right, line.attribute(r"direction=(\w+)")


def _start_and_step(module: Module, side: _Affine, body: str, outside: str, state: str) -> tuple[int, int] | None:
    """The initial value of a side of the comparison, and its increment per iteration."""
    if side.element is None:
        return side.constant, 0
    start = _tuple_element(module, outside, state, side.element, None)
    after = _tuple_element(module, body, module.root(body).name, side.element, _INSIDE)
    if not isinstance(start, _Affine) or start.element is not None:
        return None
    if not isinstance(after, _Affine) or after.element != side.element:
        return None
    return start.constant + side.constant, after.constant


def _tuple_element(module: Module, computation: str, name: str, element: int, arguments: _Arguments) -> _Value:
    """One element of a tuple instruction, without evaluating the others."""
    line = module.computations[computation].get(name)
    if line is not None and line.opcode == "tuple":
        return _value(module, computation, line.operands[element], arguments)
    return _element(module, _value(module, computation, name, arguments), element)


def _count(difference: int, step: int, direction: str) -> int | None:
    """The iterations from i = 0 for which `difference + i * step` compares true with 0; None if endless."""
    if direction in ("GT", "GE"):
        return _count(-difference, -step, direction.replace("G", "L"))
    if direction not in ("LT", "LE"):
        return None
    below = -difference + (direction == "LE")
    if below <= 0:
        return 0
    return -(-below // step) if step > 0 else None
