"""Which instructions are stored: the others are computed inside the ones that read them.

After XLA:CPU's instruction fusion (openxla/xla, `service/instruction_fusion.cc`,
`service/cpu/cpu_instruction_fusion.cc`), last instruction first: a consumer takes in a producer that is computed
element by element

- unless it is dear and has another consumer, or the consumer reads its elements several times;
- unless it reads more than one array as large as its result, more in all than it makes, and some consumer can't take
  it in: then it is stored for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import library
from .instruction import Instruction, users

CONCATENATED = 8
"""Arrays; a concatenation of more is stored, and so are its operands."""


@dataclass(slots=True, eq=False)
class Kernel:
    """One stored instruction, with those that are computed inside it."""

    root: Instruction
    members: list[Instruction] = field(default_factory=list)
    """In order, the root last."""
    operands: list[Instruction] = field(default_factory=list)
    """What is read from memory: roots of other kernels, arguments, and parts."""


def fuse(instructions: Sequence[Instruction], results: Sequence[Instruction]) -> list[Kernel]:
    """The kernels of a body in the order of their roots.

    Args:
        instructions: in an order in which operands come first.
        results: stored whatever reads them.
    """
    return _Fusion(instructions, results).kernels()


class _Fusion:
    def __init__(self, instructions: Sequence[Instruction], results: Sequence[Instruction]):
        self.instructions = instructions
        self.results = set(results)
        self.place = {one: k for k, one in enumerate(instructions)}
        self.users = users(instructions)
        self.kept: set[Instruction] = set()
        self.groups = library.groups(instructions, self.users, self.results)
        self.grouped = {m for members in self.groups.values() for m in members}
        self.paths: dict[tuple[Instruction, Instruction], bool] = {}

    def kernels(self) -> list[Kernel]:
        for one in reversed(self.instructions):
            if self.is_taken(one) and not _nearly_unary(one) and _reads_more(one):
                if not all(self.on_all_paths(one, user) for user in self.users[one]):
                    self.kept.add(one)
        stored: dict[Instruction, Kernel] = {}
        readers: dict[Instruction, set[Instruction]] = {}  # producer -> kernels (by root) that read it as things stand
        for one, their in self.users.items():
            readers[one] = set(their)
        found = []
        for one in reversed(self.instructions):
            if one in self.groups:
                kernel = self.kernel_of_group(one, readers)
            elif one in self.grouped or (one.role in ("loop", "view") and one not in self.results and not readers[one]):
                continue  # all consumers compute it themselves
            else:
                kernel = self.grown(one, readers)
            stored[one] = kernel
            found.append(kernel)
        return found[::-1]

    def grown(self, root: Instruction, readers: dict[Instruction, set[Instruction]]) -> Kernel:
        """The kernel of a root; what only it reads is gone from elsewhere, of the rest it has copies."""
        members, inside, gone = [root], {root}, {root}
        takes = root.role in ("loop", "view")
        waiting = list(dict.fromkeys(root.operands)) if takes else []
        while waiting:
            waiting.sort(key=self.place.__getitem__)
            producer = waiting.pop()
            others = readers[producer] - gone
            if not self.takes([m for m in members if producer in m.operands], producer, others):
                continue
            members.append(producer)
            inside.add(producer)
            readers[producer] = others
            for operand in dict.fromkeys(producer.operands):
                readers[operand].add(root)
                if not others:
                    readers[operand].discard(producer)
                if operand not in inside and operand not in waiting:
                    waiting.append(operand)
            if not others:
                gone.add(producer)
        members.sort(key=self.place.__getitem__)
        operands = dict.fromkeys(p for m in members for p in m.operands if p not in inside)
        return Kernel(root, members, list(operands))

    def kernel_of_group(self, root: Instruction, readers: dict[Instruction, set[Instruction]]) -> Kernel:
        """The kernel of a reduction with its neighbours."""
        inside = self.groups[root]
        members = sorted(inside, key=self.place.__getitem__)
        operands = dict.fromkeys(p for m in members for p in m.operands if p not in inside)
        for operand in operands:
            readers[operand] = (readers[operand] - inside) | {root}
        return Kernel(root, members, list(operands))

    def takes(self, takers: Sequence[Instruction], producer: Instruction, others: set[Instruction]) -> bool:
        """Whether a kernel takes in a producer that some of its members read."""
        if not self.is_taken(producer) or producer in self.kept or producer in self.results:
            return False
        if producer.expensive and (others or any(_repeats(t, producer) for t in takers)):
            return False
        return not any(_is_long(t) for t in takers)

    def is_taken(self, one: Instruction) -> bool:
        return one.role in ("loop", "view") and one not in self.grouped and not _is_long(one)

    def on_all_paths(self, producer: Instruction, consumer: Instruction) -> bool:
        """Whether a consumer can take in a producer along every way from one to the other."""
        if consumer is producer:
            return True
        key = (producer, consumer)
        if key not in self.paths:
            self.paths[key] = (
                consumer.role in ("loop", "view")
                and consumer not in self.grouped
                and all(
                    self.could_take(consumer, operand) and self.on_all_paths(producer, operand)
                    for operand in consumer.operands
                    if self.reaches(producer, operand)
                )
            )
        return self.paths[key]

    def could_take(self, consumer: Instruction, operand: Instruction) -> bool:
        if not self.is_taken(operand) or operand in self.kept or _is_long(consumer):
            return False
        return not (operand.expensive and (len(self.users[operand]) > 1 or _repeats(consumer, operand)))

    def reaches(self, a: Instruction, b: Instruction) -> bool:
        """Whether b is a or depends on it."""
        if a is b:
            return True
        first, seen, waiting = self.place[a], {b}, [b]
        while waiting:
            for operand in waiting.pop().operands:
                if operand is a:
                    return True
                if operand not in seen and self.place[operand] > first:
                    seen.add(operand)
                    waiting.append(operand)
        return False


def _nearly_unary(one: Instruction) -> bool:
    """Whether at most one operand has as many dims as the result."""
    rank = sum(n > 1 for n in one.shape)
    large = [
        x for x in one.operands if sum(n > 1 for n in x.shape) >= rank and x.name not in ("broadcast_in_dim", "iota")
    ]
    return len(large) <= 1


def _reads_more(one: Instruction) -> bool:
    return sum(x.num_elements for x in dict.fromkeys(one.operands)) > one.num_elements


def _repeats(consumer: Instruction, producer: Instruction) -> bool:
    """Whether a consumer reads elements of a producer several times."""
    return consumer.reuses and bool(consumer.operands) and consumer.operands[0] is producer


def _is_long(one: Instruction) -> bool:
    """Whether it is a concatenation that is not computed element by element."""
    if one.name not in ("concatenate", "stack"):
        return False
    minor = one.eqn is not None and one.eqn.params.get("dimension", one.eqn.params.get("axis")) == len(one.shape) - 1
    width = one.num_bytes // max(1, one.num_elements)
    return len(one.operands) > CONCATENATED or (
        minor and len(one.shape) > 1 and one.shape[-1] * width >= 64 and one.num_bytes >= 2048
    )
