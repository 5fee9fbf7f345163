"""What one device runs: instructions on the arrays that it holds, before it is known which of them are ever stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["", "forward", "backward"]
"""What of a gradient an op is part of: what is differentiated, its transpose, or neither."""

Role = Literal["argument", "loop", "library", "view", "part"]
"""`argument` is there from the start; `loop` is computed element by element, so that a consumer may compute it itself;
`library` is stored, and so is what it reads (dots, sorts, collectives, loops of the program); `view` is its operand
under another shape; `part` is one of several results, made when its operand is."""


@dataclass(slots=True, eq=False)
class Instruction:
    """One op on one device."""

    name: str
    """The primitive, or the collective."""
    role: Role
    operands: list[Instruction]
    shape: tuple[int, ...]
    """On one device."""
    num_bytes: int
    """On one device."""
    elementwise: bool = False
    expensive: bool = False
    """Whether it is not computed twice."""
    reuses: bool = False
    """Whether it reads elements of its first operand several times."""
    by_library: bool = False
    """Whether it is a reduction that a library runs, together with its neighbours."""
    in_place: tuple[tuple[int, int], ...] = ()
    """(operand, part) that are one buffer; part 0 is the instruction itself where it has no parts."""
    bodies: tuple[Body, ...] = ()
    value: int | None = None
    """The value of the graph that it makes or moves."""
    eqn: Any = None
    group: Any = None
    """Collectives of one group may be combined."""
    phase: Phase = ""

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}"

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.num_bytes // max(1, self.num_elements)

    @property
    def num_elements(self) -> int:
        """On one device."""
        count = 1
        for n in self.shape:
            count *= n
        return count


@dataclass(slots=True, eq=False)
class Body:
    """The instructions of a program, or of what a loop or a branch runs."""

    instructions: list[Instruction] = field(default_factory=list)
    arguments: list[Instruction] = field(default_factory=list)
    results: list[Instruction] = field(default_factory=list)

    def needed(self) -> list[Instruction]:
        """The instructions that some result depends on, in order; parts of one that is needed are too."""
        alive: set[Instruction] = set()
        waiting: list[Instruction] = list(self.results)
        while waiting:
            one = waiting.pop()
            if one not in alive:
                alive.add(one)
                waiting += one.operands
        return [i for i in self.instructions if i in alive or (i.role == "part" and i.operands[0] in alive)]


def users(instructions: Sequence[Instruction]) -> dict[Instruction, list[Instruction]]:
    """Instruction -> those that read it, in order and each once."""
    found: dict[Instruction, list[Instruction]] = {i: [] for i in instructions}
    for i in instructions:
        for operand in dict.fromkeys(i.operands):
            found[operand].append(i)
    return found


def everywhere(body: Body) -> Iterator[Instruction]:
    """The instructions of a body and of all bodies inside it."""
    for i in body.instructions:
        yield i
        for inner in i.bodies:
            yield from everywhere(inner)
