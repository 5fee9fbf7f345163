"""Instruction fusion: which instructions are stored, and which are computed inside their consumers.

Consumers compute a fusible producer (openxla/xla, `service/instruction_fusion.cc`, `service/gpu/transforms/
priority_fusion.cc`)

- unless it has several, and is expensive, or storing it once moves fewer bytes (on XLA:CPU: elements)
  than reading what each must read;
- also a matrix product, on TPUs, if only they read it: a kernel has at most one;
- unless a library runs one of them (`backends/cpu/transforms/library_rewriter.cc`): a large reduction with the
  elementwise ops that only it uses, and its only user. What they share with others is stored, but on XLA:CPU others
  compute it again if it has at most one operand as large (`InstructionFusion::EffectivelyAtMostUnary`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from .instruction import Instruction, users
from .primitive_traits import REDUCTIONS

SLICES = frozenset({"slice", "dynamic_slice"})
AFTER_PRODUCTS = REDUCTIONS | {"transpose", "dynamic_update_slice"}
"""What a product's kernel computes of its result besides elementwise ops."""


IN_LIBRARY = frozenset(
    "abs add add_any ceil convert convert_element_type cos div erf exp expm1 floor integer_pow log log1p logistic max "
    "min mul neg pow round rsqrt sign sin sqrt square sub tan tanh".split()
)
"""Elementwise ops on floats that XLA:CPU's library computes before it reduces their results."""


@dataclass(slots=True, eq=False)
class Kernel:
    """A fused computation: one stored instruction and those computed inside it."""

    root: Instruction
    members: list[Instruction] = field(default_factory=list)
    """In order, the root last."""
    operands: list[Instruction] = field(default_factory=list)
    """Reads from memory: roots of other kernels, arguments and tuple elements."""


def fuse(
    instructions: Sequence[Instruction],
    results: Sequence[Instruction],
    *,
    counts_bytes: bool = True,
    block_elements: int = 0,
) -> list[Kernel]:
    """The kernels of a body in the order of their roots.

    Args:
        instructions: operands before their users.
        results: always stored.
        counts_bytes: whether bytes decide what is computed again, not elements as on XLA:CPU.
        block_elements: how many elements one block of threads reduces to one, which are stored for it.
    """
    return _Fusion(instructions, results, counts_bytes, block_elements).kernels()


class _Fusion:
    def __init__(
        self,
        instructions: Sequence[Instruction],
        results: Sequence[Instruction],
        counts_bytes: bool,
        block_elements: int,
    ):
        self.instructions = instructions
        self.place = {one: k for k, one in enumerate(instructions)}
        self.users = users(instructions)
        self.stored = set(results)
        """Not computed inside any consumer."""
        self.read_by_library: set[Instruction] = set()
        """Stored for a library, but other consumers may compute it again."""
        for one in reversed(instructions):
            if one.is_library_reduction:
                self.stored.add(self.library_result(one))
                self.read_by_library.update(self.library_operands(one))
            if one.name in REDUCTIONS and one.num_elements == 1 and one.operands[0].num_elements <= block_elements:
                self.stored.update(one.operands)
        self.stored.update(self.ends_of_products())
        self.recomputed = set() if counts_bytes else {*filter(self.is_recomputed, instructions)}
        self.once = self.costly({one: one.num_bytes if counts_bytes else one.num_elements for one in instructions})

    def ends_of_products(self) -> Iterator[Instruction]:
        """The last of the elementwise ops after a product, if several or a product read it: its kernel stores that."""
        found: set[Instruction] = set()
        for one in self.instructions:
            own = [x for x in one.operands if len(self.users[x]) == 1 and x not in self.stored]
            if one.elementwise and any(x.fuses_operands or x in found for x in own):
                found.add(one)
                if len(self.users[one]) > 1 or any(x.fuses_operands for x in self.users[one]):
                    yield one

    def costly(self, sizes: Mapping[Instruction, int]) -> set[Instruction]:
        """What is read faster from memory than computed again by each of several users."""
        found: set[Instruction] = set()
        sources: dict[Instruction, set[Instruction]] = {}
        """Per instruction what must be read to compute it: itself if it is stored."""
        for one in self.instructions:
            sources[one] = {one}  # a slice is read as what it is, not as its operand
            if _is_fusible(one) and one not in self.stored and one.name not in SLICES:
                reads = self.united_sources(one, sources)
                if self.is_costly(one, sizes, reads):
                    found.add(one)
                else:
                    sources[one] = reads
        return found

    def united_sources(self, one: Instruction, sources: dict[Instruction, set[Instruction]]) -> set[Instruction]:
        """What must be read to compute the operands of an instruction.

        The largest of the sets that nothing else needs is extended: a sum of n arrays, added one by one, takes n steps.
        """
        operands = dict.fromkeys(one.operands)
        own = [x for x in operands if len(self.users[x]) == 1]
        largest = max(own, key=lambda x: len(sources[x]), default=None)
        found = set() if largest is None else sources.pop(largest)
        found.update(*(sources[x] for x in operands if x is not largest))
        return found

    def is_costly(self, one: Instruction, sizes: Mapping[Instruction, int], reads: Collection[Instruction]) -> bool:
        """Whether several users move more if each computes it than if one kernel stores it for all."""
        users = self.users[one]
        again = [y for x in users if x in self.recomputed for y in self.users[x] if _is_fusible(y)]
        readers = dict.fromkeys([*users, *again])
        if len(readers) < 2 or one in self.recomputed:
            return False
        if one.expensive:
            return True
        size, read_size = sizes[one], sum(sizes[x] for x in reads)
        if one in self.read_by_library or not all(_is_fusible(x) or x.fuses_operands for x in users):
            return read_size > size  # it is stored for one of them anyway
        return len(readers) * read_size > read_size + (len(readers) + 1) * size

    def is_recomputed(self, one: Instruction) -> bool:
        """Whether XLA:CPU computes again for some users what it stores for another: they read no more arrays."""
        if one.expensive or one in self.stored or not _is_fusible(one) or one.name in SLICES:
            return False
        is_stored = one in self.read_by_library or not all(map(_is_fusible, self.users[one]))
        return is_stored and len(self.users[one]) > 1 and is_effectively_unary(one)

    def library_result(self, reduction: Instruction) -> Instruction:
        """What a library stores of a reduction: its only user, if that is elementwise, or itself."""
        below = self.users[reduction]
        return below[0] if len(below) == 1 and below[0].elementwise and reduction not in self.stored else reduction

    def library_operands(self, reduction: Instruction) -> Iterator[Instruction]:
        """The operands of a reduction and of the ops that a library runs with it."""
        inside, seen = {reduction}, set(reduction.operands)
        waiting = [(-self.place[x], x) for x in seen]
        heapq.heapify(waiting)
        while waiting:  # the last one first: all that reads it has been seen
            _, one = heapq.heappop(waiting)
            is_free = _is_fusible(one) and one not in self.stored and one not in self.read_by_library
            if is_free and runs_in_library(one) and all(user in inside for user in self.users[one]):
                inside.add(one)
                for operand in one.operands:
                    if operand not in seen:
                        seen.add(operand)
                        heapq.heappush(waiting, (-self.place[operand], operand))
            else:
                yield one

    def kernels(self) -> list[Kernel]:
        readers = {one: set(its_users) for one, its_users in self.users.items()}
        """Producer -> kernels (by root) that read it so far."""
        found = []
        for one in reversed(self.instructions):
            if one in self.stored or readers[one] or not (_is_fusible(one) or one.fuses_operands):
                found.append(self.kernel_of(one, readers))
        return found[::-1]

    def kernel_of(self, root: Instruction, readers: dict[Instruction, set[Instruction]]) -> Kernel:
        """The kernel of a root: producers with no other reader move into it, others are duplicated."""
        members, inside = [root], {root}
        seen = set(root.operands) if _is_fusible(root) or root.fuses_operands else set()
        waiting = [(-self.place[x], x) for x in seen]
        heapq.heapify(waiting)
        has_product = root.fuses_operands
        is_library = any(x.is_library_reduction for x in (root, *(x for x in root.operands if x not in self.stored)))
        while waiting:
            _, producer = heapq.heappop(waiting)
            others = len(readers[producer]) - (root in readers[producer])
            ends = producer.fuses_operands and not (others or has_product) and self.ends_product(producer, inside)
            if not (_is_fusible(producer) or ends):
                continue
            is_read = producer in self.stored or (is_library and producer in self.read_by_library)
            if is_read or (producer in self.once and others):
                continue
            has_product = has_product or producer.fuses_operands
            members.append(producer)
            inside.add(producer)
            readers[producer].discard(root)
            for operand in dict.fromkeys(producer.operands):
                readers[operand].add(root)
                if not others:
                    readers[operand].discard(producer)
                if operand not in seen:
                    seen.add(operand)
                    heapq.heappush(waiting, (-self.place[operand], operand))
        members.sort(key=self.place.__getitem__)
        operands = dict.fromkeys(p for m in members for p in m.operands if p not in inside)
        return Kernel(root, members, list(operands))

    def ends_product(self, product: Instruction, inside: Collection[Instruction]) -> bool:
        """Whether a kernel's instructions that depend on a product can run on its tiles, in the product's kernel."""
        found, waiting = {product}, [product]
        while waiting:
            for user in self.users[waiting.pop()]:
                if user in inside and user not in found:
                    if not (user.elementwise or user.role == "bitcast" or user.name in AFTER_PRODUCTS):
                        return False
                    found.add(user)
                    waiting.append(user)
        return True


def runs_in_library(one: Instruction) -> bool:
    """Whether XLA:CPU's library computes an operand of a reduction (openxla/xla, `backends/cpu/ynn_support.cc`)."""
    if one.name == "dynamic_slice":
        return False
    atoms = () if one.eqn is None else (*one.eqn.invars, *one.eqn.outvars)
    are_floats = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in atoms)
    return not one.elementwise or (are_floats and one.name in IN_LIBRARY)


def is_effectively_unary(one: Instruction) -> bool:
    """Whether at most one operand has as many dims as the result and is not a broadcast."""
    rank = _true_rank(one)
    return sum(not x.name.startswith("broadcast") and _true_rank(x) >= rank for x in dict.fromkeys(one.operands)) <= 1


def _true_rank(one: Instruction) -> int:
    return sum(size > 1 for size in one.shape)


def _is_fusible(one: Instruction) -> bool:
    return one.role in ("fusible", "bitcast")
