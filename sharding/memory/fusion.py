"""Instruction fusion: which instructions are stored, and which are computed inside their consumers.

Consumers compute a fusible producer (openxla/xla, `service/instruction_fusion.cc`, `service/gpu/transforms/
priority_fusion.cc`)

- unless it has several, and is expensive, or storing it once moves fewer bytes than reading what each must read; on
  XLA:CPU: or it reads several large arrays, and some consumer can't compute it;
- unless a library runs one of them (`backends/cpu/transforms/library_rewriter.cc`): a large reduction with the
  elementwise ops that only it uses, and its only user. What they share with others is stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .instruction import Instruction, users
from .primitive_traits import REDUCTIONS

FILLS = frozenset({"broadcast", "broadcast_in_dim", "iota"})
SLICES = frozenset({"slice", "dynamic_slice"})


@dataclass(slots=True, eq=False)
class Kernel:
    """A fused computation: one stored instruction and those computed inside it."""

    root: Instruction
    members: list[Instruction] = field(default_factory=list)
    """In order, the root last."""
    operands: list[Instruction] = field(default_factory=list)
    """Reads from memory: roots of other kernels, arguments and tuple elements."""


def fuse(
    instructions: Sequence[Instruction], results: Sequence[Instruction], *, counts_bytes: bool = True
) -> list[Kernel]:
    """The kernels of a body in the order of their roots.

    Args:
        instructions: operands before their users.
        results: always stored.
        counts_bytes: whether the bytes to read decide what is computed again, as everywhere but on XLA:CPU.
    """
    return _Fusion(instructions, results, counts_bytes).kernels()


class _Fusion:
    def __init__(self, instructions: Sequence[Instruction], results: Sequence[Instruction], counts_bytes: bool):
        self.instructions = instructions
        self.place = {one: k for k, one in enumerate(instructions)}
        self.users = users(instructions)
        self.stored = set(results)
        """Not computed inside any consumer."""
        for one in reversed(instructions):
            if one.is_library_reduction:
                self.stored.update(self.stored_around(one))
        if counts_bytes:
            self.scaled = self.scaled_by_reductions()
            self.once = self.costly()
        else:
            self.store_what_splits()
            self.once = {one for one in instructions if one.expensive}

    def store_what_splits(self) -> None:
        """Store what reads several large arrays and can't be computed on all paths to its users.

        Sets of instructions are bits of integers.
        """
        bit = {one: 1 << k for k, one in enumerate(reversed(self.instructions))}
        below: dict[Instruction, int] = {}
        """What depends on it."""
        split: dict[Instruction, int] = {}
        """That along a path on which something is stored."""
        waiting = {one: sum(x in bit for x in set(one.operands)) for one in self.instructions}
        for one in reversed(self.instructions):
            readers = self.users[one]
            may_move = _is_fusible(one) and one not in self.stored and not (one.expensive and len(readers) > 1)
            below[one] = split[one] = 0
            for user in readers:
                below[one] |= below[user] | bit[user]
                split[one] |= split[user] if may_move and _is_fusible(user) else below[user] | bit[user]
            if may_move and _reads_more(one) and any(split[one] & bit[user] for user in readers):
                self.stored.add(one)
                split[one] = below[one]
            for user in set(readers):
                waiting[user] -= 1
                if not waiting[user]:
                    del below[user], split[user]

    def scaled_by_reductions(self) -> set[Instruction]:
        """What is computed from reduced values that are broadcast again, as a softmax is."""
        reduced, found = set[Instruction](), set[Instruction]()
        for one in self.instructions:
            sources = [x for x in one.operands if x.num_elements > 1]
            if one.name in REDUCTIONS or (sources and reduced.issuperset(sources)):
                reduced.add(one)
            elif not reduced.isdisjoint(sources) or (_is_fusible(one) and not found.isdisjoint(sources)):
                found.add(one)
        return found

    def costly(self) -> set[Instruction]:
        """What is read faster from memory than computed again by each of several users."""
        found: set[Instruction] = set()
        sources: dict[Instruction, frozenset[Instruction]] = {}
        """Per instruction what must be read to compute it: itself if it is stored."""
        for one in self.instructions:
            sources[one] = frozenset((one,))  # a slice is read as what it is, not as its operand
            if _is_fusible(one) and one not in self.stored and one.name not in SLICES:
                reads = frozenset[Instruction]().union(*(sources[x] for x in one.operands))
                if self.is_costly(one, sum(x.num_bytes for x in reads)):
                    found.add(one)
                else:
                    sources[one] = reads
        return found

    def is_costly(self, one: Instruction, read_bytes: int) -> bool:
        """Whether several users move more bytes if each computes it than if one kernel stores it for all."""
        readers = self.users[one]
        if len(readers) < 2:
            return False
        if one.expensive:
            return True
        if not all(_is_fusible(x) or x.fuses_operands for x in readers):  # it is stored for one of them anyway
            return read_bytes > one.num_bytes
        return len(readers) * read_bytes > read_bytes + (len(readers) + 1) * one.num_bytes

    def stored_around(self, reduction: Instruction) -> Iterator[Instruction]:
        """The operands and the result of a reduction and of the ops that a library runs with it."""
        inside, waiting = {reduction}, list(reduction.operands)
        while waiting:
            one = waiting.pop()
            if one in inside:
                continue
            if _is_fusible(one) and one not in self.stored and all(user in inside for user in self.users[one]):
                inside.add(one)
                waiting += one.operands
            else:
                yield one
        below = self.users[reduction]
        yield below[0] if len(below) == 1 and below[0].elementwise and reduction not in self.stored else reduction

    def kernels(self) -> list[Kernel]:
        readers = {one: set(its_users) for one, its_users in self.users.items()}
        """Producer -> kernels (by root) that read it so far."""
        found = []
        for one in reversed(self.instructions):
            if not _is_fusible(one) or one in self.stored or readers[one]:
                found.append(self.kernel_of(one, readers))
        return found[::-1]

    def kernel_of(self, root: Instruction, readers: dict[Instruction, set[Instruction]]) -> Kernel:
        """The kernel of a root: producers with no other reader move into it, others are duplicated."""
        members, inside, gone = [root], {root}, {root}
        seen = set(root.operands) if _is_fusible(root) or root.fuses_operands else set()
        waiting = [(-self.place[x], x) for x in seen]
        heapq.heapify(waiting)
        while waiting:
            _, producer = heapq.heappop(waiting)
            others = readers[producer] - gone
            if root.fuses_operands and producer in self.scaled and producer.phase == "backward":
                continue
            if not _is_fusible(producer) or producer in self.stored or (producer in self.once and others):
                continue
            members.append(producer)
            inside.add(producer)
            readers[producer] = others
            for operand in dict.fromkeys(producer.operands):
                readers[operand].add(root)
                if not others:
                    readers[operand].discard(producer)
                if operand not in seen:
                    seen.add(operand)
                    heapq.heappush(waiting, (-self.place[operand], operand))
            if not others:
                gone.add(producer)
        members.sort(key=self.place.__getitem__)
        operands = dict.fromkeys(p for m in members for p in m.operands if p not in inside)
        return Kernel(root, members, list(operands))


def _is_fusible(one: Instruction) -> bool:
    return one.role in ("fusible", "bitcast")


def _reads_more(one: Instruction) -> bool:
    """Whether it reads several arrays as large as its result, and more elements than it has."""
    ndim = sum(n > 1 for n in one.shape)
    large = [x for x in one.operands if x.name not in FILLS and sum(n > 1 for n in x.shape) >= ndim]
    return len(large) > 1 and sum(x.num_elements for x in dict.fromkeys(one.operands)) > one.num_elements
