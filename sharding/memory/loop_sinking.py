"""What loops compute themselves in each iteration, instead of reading it from memory.

All compilers move constants that an iteration reads into the loop. XLA:TPU also moves what elementwise ops make of
broadcasts, such as masks, unless an iteration reads a part: the loop reads what is broadcast (openxla/xla,
`service/while_loop_constant_sinking.cc` and `while_loop_fusible_sinking.cc`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .dead_results import LOOPS
from .instruction import Body, Instruction, users
from .primitive_traits import SLICES

SPREADING = frozenset({"broadcast", "broadcast_in_dim", "iota"})
"""Ops whose result is larger than what they read."""


def sink_into_loops(body: Body) -> None:
    """Moves such arrays of a body into its loops, constants also into the loops inside; `drop_dead_results` drops them
    as operands of the loops."""
    for loop in [one for one in body.instructions if one.bodies]:
        is_loop = loop.name in LOOPS
        if is_loop:
            _sink(loop, lambda x, readers: x.is_constant)
        for inner in loop.bodies:
            sink_into_loops(inner)
        if is_loop and body.traits.sinks_broadcasts:
            _sink(loop, lambda x, readers: _is_cheap(x) and not any(map(_takes_part, readers)))


def _sink(loop: Instruction, moves: Callable[[Instruction, Sequence[Instruction]], bool]) -> None:
    """Moves what a loop does not change.

    Args:
        moves: whether an operand moves that some instructions of the body read.
    """
    inner, found = loop.bodies[0], _Loop(loop)
    carried = {at for at, _ in loop.in_place}
    readers = users(inner.instructions)
    own: dict[Instruction, Instruction] = {}
    shift = len(loop.operands) - len(inner.arguments)
    for at, argument in enumerate([*inner.arguments], shift):
        if at not in carried and moves(loop.operands[at], readers[argument]):
            own[argument] = found.inside(loop.operands[at])
    for reader in dict.fromkeys(reader for argument in own for reader in readers[argument]):
        reader.operands = [own.get(x, x) for x in reader.operands]
    inner.results = [own.get(x, x) for x in inner.results]
    inner.instructions[:0] = found.made


def _takes_part(one: Instruction) -> bool:
    return one.name in SLICES or one.name == "gather"


def _is_cheap(x: Instruction) -> bool:
    """Whether only elementwise ops, reshapes and transposes of broadcasts compute it."""
    waiting, seen = [x], {x}
    while waiting:
        one = waiting.pop()
        if one.name in SPREADING:
            continue
        is_alike = one.role == "bitcast" or (one.role == "fusible" and (one.elementwise or one.name == "transpose"))
        if not is_alike or not one.operands:
            return False
        new = {*one.operands} - seen
        waiting += new
        seen |= new
    return True


@dataclasses.dataclass(slots=True)
class _Loop:
    """A loop, and what moves into it."""

    loop: Instruction
    made: list[Instruction] = dataclasses.field(default_factory=list)
    moved: dict[Instruction, Instruction] = dataclasses.field(default_factory=dict)
    """Instruction outside -> the one inside."""

    def inside(self, x: Instruction) -> Instruction:
        """A copy of an instruction, and of all that it needs; what a broadcast reads becomes an operand of the loop."""
        if x not in self.moved:
            move = self.argument if x.name in SPREADING else self.inside
            self.moved[x] = dataclasses.replace(x, operands=[move(y) for y in x.operands])
            self.made.append(self.moved[x])
        return self.moved[x]

    def argument(self, x: Instruction) -> Instruction:
        """What a loop reads, as an argument of its body."""
        if x not in self.moved:
            self.moved[x] = Instruction("argument", "argument", [], x.shape, x.num_bytes, value=x.value)
            self.loop.operands.append(x)
            self.loop.bodies[0].arguments.append(self.moved[x])
            self.made.append(self.moved[x])
        return self.moved[x]
