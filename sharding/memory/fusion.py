"""Instruction fusion: which instructions are stored, and which are computed inside their consumers.

After XLA:CPU's instruction fusion (openxla/xla, `service/instruction_fusion.cc`,
`service/cpu/cpu_instruction_fusion.cc`), last instruction first: a consumer fuses a fusible producer

- unless the producer is expensive and has another consumer, or the consumer reads its elements several times;
- unless the producer reads more than one array as large as its result, more elements in all than it produces, and some
  consumer can't fuse it: then it is stored for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import cpu_library_reductions
from .instruction import Instruction, users

MOST_CONCATENATED = 8
"""A concatenation of more arrays is stored, and so are its operands."""


@dataclass(slots=True, eq=False)
class Kernel:
    """A fused computation: one stored instruction and those computed inside it."""

    root: Instruction
    members: list[Instruction] = field(default_factory=list)
    """In order, the root last."""
    operands: list[Instruction] = field(default_factory=list)
    """Reads from memory: roots of other kernels, arguments and tuple elements."""


def fuse(instructions: Sequence[Instruction], results: Sequence[Instruction]) -> list[Kernel]:
    """The kernels of a body in the order of their roots.

    Args:
        instructions: operands before their users.
        results: always stored.
    """
    return _Fusion(instructions, results).kernels()


class _Fusion:
    def __init__(self, instructions: Sequence[Instruction], results: Sequence[Instruction]):
        self.instructions = instructions
        self.results = set(results)
        self.place = {one: k for k, one in enumerate(instructions)}
        self.users = users(instructions)
        self.stored: set[Instruction] = set()
        self.expensive = self.not_duplicated()
        self.groups = cpu_library_reductions.groups(instructions, self.users, self.results)
        self.grouped = {m for members in self.groups.values() for m in members}
        self.paths: dict[tuple[Instruction, Instruction], bool] = {}

    def not_duplicated(self) -> set[Instruction]:
        """The expensive instructions; where random bits have one elementwise reader, it and not the bits are stored."""
        found = {one for one in self.instructions if one.expensive}
        drawn = {one for one in self.instructions if one.name == "threefry2x32" and one.role == "fusible"}
        for one in self.instructions:
            if one.elementwise and any(x in drawn and len(self.users[x]) == 1 for x in one.operands):
                drawn.add(one)
        return found | drawn

    def kernels(self) -> list[Kernel]:
        for one in reversed(self.instructions):
            if self.is_fusible(one) and not _nearly_unary(one) and _reads_more(one):
                if not all(self.on_all_paths(one, user) for user in self.users[one]):
                    self.stored.add(one)
        readers: dict[Instruction, set[Instruction]] = {}  # producer -> kernels (by root) that read it so far
        for one, its_users in self.users.items():
            readers[one] = set(its_users)
        found = []
        for one in reversed(self.instructions):
            if one in self.groups:
                kernel = self.kernel_of_group(one, readers)
            elif one in self.grouped or (
                one.role in ("fusible", "bitcast") and one not in self.results and not readers[one]
            ):
                continue  # fused into all consumers
            else:
                kernel = self.kernel_of(one, readers)
            found.append(kernel)
        return found[::-1]

    def kernel_of(self, root: Instruction, readers: dict[Instruction, set[Instruction]]) -> Kernel:
        """The kernel of a root: producers with no other reader move into it, others are duplicated."""
        members, inside, gone = [root], {root}, {root}
        waiting = list(dict.fromkeys(root.operands)) if root.role in ("fusible", "bitcast") else []
        while waiting:
            waiting.sort(key=self.place.__getitem__)
            producer = waiting.pop()
            others = readers[producer] - gone
            if not self.fuses([m for m in members if producer in m.operands], producer, others):
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
        """The kernel of a library reduction with its neighbours."""
        inside = self.groups[root]
        members = sorted(inside, key=self.place.__getitem__)
        operands = dict.fromkeys(p for m in members for p in m.operands if p not in inside)
        for operand in operands:
            readers[operand] = (readers[operand] - inside) | {root}
        return Kernel(root, members, list(operands))

    def fuses(self, consumers: Sequence[Instruction], producer: Instruction, others: set[Instruction]) -> bool:
        """Whether a kernel fuses a producer that these of its members read."""
        if not self.is_fusible(producer) or producer in self.stored or producer in self.results:
            return False
        if producer in self.expensive and (others or any(_reuses(c, producer) for c in consumers)):
            return False
        return not any(_is_long_concatenation(c) for c in consumers)

    def is_fusible(self, one: Instruction) -> bool:
        return one.role in ("fusible", "bitcast") and one not in self.grouped and not _is_long_concatenation(one)

    def on_all_paths(self, producer: Instruction, consumer: Instruction) -> bool:
        """Whether a consumer can fuse a producer along every path between them."""
        if consumer is producer:
            return True
        key = (producer, consumer)
        if key not in self.paths:
            self.paths[key] = (
                consumer.role in ("fusible", "bitcast")
                and consumer not in self.grouped
                and all(
                    self.can_fuse(consumer, operand) and self.on_all_paths(producer, operand)
                    for operand in consumer.operands
                    if self.reaches(producer, operand)
                )
            )
        return self.paths[key]

    def can_fuse(self, consumer: Instruction, operand: Instruction) -> bool:
        if not self.is_fusible(operand) or operand in self.stored or _is_long_concatenation(consumer):
            return False
        return not (operand in self.expensive and (len(self.users[operand]) > 1 or _reuses(consumer, operand)))

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
    ndim = sum(n > 1 for n in one.shape)
    large = [
        x for x in one.operands if sum(n > 1 for n in x.shape) >= ndim and x.name not in ("broadcast_in_dim", "iota")
    ]
    return len(large) <= 1


def _reads_more(one: Instruction) -> bool:
    return sum(x.num_elements for x in dict.fromkeys(one.operands)) > one.num_elements


def _reuses(consumer: Instruction, producer: Instruction) -> bool:
    """Whether a consumer reads elements of a producer several times."""
    return consumer.reuses_operand and bool(consumer.operands) and consumer.operands[0] is producer


def _is_long_concatenation(one: Instruction) -> bool:
    """Whether it is a concatenation that XLA:CPU does not fuse: of many arrays, or along a long minor dim."""
    if one.name not in ("concatenate", "stack"):
        return False
    minor = one.eqn is not None and one.eqn.params.get("dimension", one.eqn.params.get("axis")) == len(one.shape) - 1
    itemsize = one.num_bytes // max(1, one.num_elements)
    return len(one.operands) > MOST_CONCATENATED or (
        minor and len(one.shape) > 1 and one.shape[-1] * itemsize >= 64 and one.num_bytes >= 2048
    )
