"""Instructions of the per-device program, before fusion decides which of their results are stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..cost.gpu_latencies import Product
from ..spec import Axis, Spec
from .compiler_traits import DEFAULT, CompilerTraits

Phase = Literal["", "forward", "backward"]
"""The pass of a gradient that an op belongs to: what is differentiated, its transpose, or neither."""

Role = Literal["argument", "fusible", "unfusible", "bitcast", "tuple-element"]
"""`argument`: live from the start. `fusible`: computed element by element, so a consumer may compute it inside its own
kernel. `unfusible`: stored, and so are its operands (dots, sorts, collectives, loops). `bitcast`: its operand under
another shape. `tuple-element`: one of several results of its operand, produced with it."""


@dataclass(slots=True, eq=False)
class Instruction:
    """One op on one device."""

    name: str
    """The primitive or collective."""
    role: Role
    operands: list[Instruction]
    shape: tuple[int, ...]
    """Local shape."""
    num_bytes: int
    """Per device."""
    padding: int = 0
    """Bytes that tiles add to that."""
    elementwise: bool = False
    expensive: bool = False
    """Whether fusion must not duplicate it."""
    fuses_operands: bool = False
    """Whether its kernel computes its operands, although it is stored."""
    is_library_reduction: bool = False
    """Whether a library runs it, a reduction, together with its neighbours."""
    in_place: tuple[tuple[int, int], ...] = ()
    """(operand, result) pairs that share a buffer; result 0 is the instruction itself unless it has tuple elements."""
    element: int = 0
    """The index of a tuple element."""
    bodies: tuple[Body, ...] = ()
    product: Product | None = None
    """The sizes of a matrix product that a kernel computes."""
    value: int | None = None
    """The graph's value that it computes or moves."""
    spec: Spec | None = None
    """Of a step of a reshard, the spec after it."""
    asked_by: Any = None
    """The equation for which it reshards."""
    eqn: Any = None
    group: Any = None
    """Collectives with an equal group may be combined."""
    axes: tuple[Axis, ...] = ()
    """The mesh axes of a collective's device groups, or those that a reshard slices over."""
    num_devices: int = 0
    """The devices of each of a collective's groups; 0 if they span hosts."""
    phase: Phase = ""
    layout: tuple[int, ...] = ()
    """The order in which its dims are stored, from the one whose elements are farthest apart; () if it is theirs."""

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}"

    @property
    def computes_operands(self) -> bool:
        """Whether a kernel with it as its root computes operands, instead of reading them."""
        return self.role in ("fusible", "bitcast") or self.fuses_operands

    def is_in_order(self, order: Sequence[int]) -> bool:
        """Whether only dims of size 1 move if its dims are ordered so."""
        large = [d for d in order if self.shape[d] > 1]
        return large == sorted(large)

    @property
    def is_constant(self) -> bool:
        """Whether it is a broadcast constant."""
        return self.name == "broadcast" and not self.operands

    @property
    def reshard(self) -> Instruction | None:
        """The last step of a reshard that it is a copy of, such as one in another order; None if there is none."""
        x = self
        while x.spec is None and x.operands and x.operands[0].value == x.value is not None:
            if x.operands[0].num_elements != x.num_elements:
                return None
            x = x.operands[0]
        return x if x.spec is not None else None

    @property
    def stored_bytes(self) -> int:
        """Bytes per device as it is stored."""
        return self.num_bytes + self.padding

    @property
    def itemsize(self) -> float:
        """Bytes per element, less than one for packed ones."""
        found = self.num_bytes / max(1, self.num_elements)
        return found if 0 < found < 1 else int(found)

    @property
    def num_elements(self) -> int:
        """Elements of the local shape."""
        return math.prod(self.shape)


def array_bytes(num_elements: int, itemsize: float) -> int:
    """Bytes of an array whose elements may be packed."""
    return math.ceil(num_elements * itemsize)


@dataclass(slots=True, eq=False)
class Body:
    """The instructions of a program, a loop body or a branch."""

    instructions: list[Instruction] = field(default_factory=list)
    arguments: list[Instruction] = field(default_factory=list)
    results: list[Instruction] = field(default_factory=list)
    effects: list[Instruction] = field(default_factory=list)
    """Instructions that run although no result depends on them, such as callbacks that print."""
    traits: CompilerTraits = DEFAULT
    """What its compiler stores."""
    all_names: frozenset[str] | None = None
    """What `names` found: each level around asks for it."""

    def names(self) -> frozenset[str]:
        """The names of the instructions of a finished body and of its nested bodies, computed once."""
        if self.all_names is None:
            inner = (body.names() for one in self.instructions for body in one.bodies)
            self.all_names = frozenset(one.name for one in self.instructions).union(*inner)
        return self.all_names

    def live_instructions(self) -> list[Instruction]:
        """The instructions that a result or an effect depends on, in order, with all tuple elements of each."""
        alive: set[Instruction] = set()
        waiting: list[Instruction] = [*self.results, *self.effects]
        while waiting:
            one = waiting.pop()
            if one not in alive:
                alive.add(one)
                waiting += one.operands
        return [i for i in self.instructions if i in alive or (i.role == "tuple-element" and i.operands[0] in alive)]


Users = Mapping[Instruction, Sequence[Instruction]]


def users(instructions: Sequence[Instruction]) -> dict[Instruction, list[Instruction]]:
    """Instruction -> its users, in order, each once."""
    found: dict[Instruction, list[Instruction]] = {i: [] for i in instructions}
    for i in instructions:
        operands = i.operands
        for operand in operands if len(operands) < 2 else dict.fromkeys(operands):
            found[operand].append(i)
    return found


def users_of(
    operands: Sequence[Instruction], instructions: Sequence[Instruction]
) -> dict[Instruction, list[Instruction]]:
    """Each of some operands -> its users among some instructions, in order, each once."""
    found: dict[Instruction, list[Instruction]] = {i: [] for i in operands}
    for i in instructions:
        for operand in found.keys() & i.operands:
            found[operand].append(i)
    return found


def all_instructions(body: Body) -> Iterator[Instruction]:
    """The instructions of a body, each before those of its nested bodies."""
    waiting = [iter(body.instructions)]
    while waiting:
        one = next(waiting[-1], None)
        if one is None:
            waiting.pop()
        else:
            yield one
            waiting += [iter(inner.instructions) for inner in reversed(one.bodies)]
