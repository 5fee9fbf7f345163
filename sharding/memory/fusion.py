"""Which instructions are stored, and which are computed inside their consumers, on accelerators.

Consumers compute a fusible producer

- unless it has several, and is expensive, or storing it once moves fewer bytes than reading what each must read; on
  GPUs as `priority_fusion` finds;
- also a matrix product, on TPUs, if only they read it: a kernel has at most one.

`cpu_fusion` has the rules of XLA:CPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .compiler_traits import DEFAULT, CompilerTraits
from .instruction import Instruction, Users, users
from .primitive_traits import REDUCTIONS, reverses_lanes, strided_dims, updates
from .priority_fusion import PriorityFusion
from .tile_layouts import keeps_tiles

SLICES = frozenset({"slice", "dynamic_slice"})
"""What a kernel reads at one place."""
PARTS = SLICES | {"split"}
"""What takes a part of an array."""
JOINS = frozenset({"concatenate", "pad", "stack"})
"""What places arrays in a larger one."""
MOST_AFTER_PRODUCT = 100
"""Ops after a product among which the last one of its kernel is searched."""
FEW_SUMMED = 64
"""A matrix product that sums fewer elements is computed again in the tiles of another one that reads it."""
AFTER_PRODUCTS = REDUCTIONS | {"transpose", "dynamic_update_slice"}
"""What a product's kernel computes of its result besides elementwise ops."""


@dataclass(slots=True, eq=False)
class Kernel:
    """A fused computation: one stored instruction and those computed inside it."""

    root: Instruction
    members: list[Instruction] = field(default_factory=list)
    """In order, the root last."""
    operands: list[Instruction] = field(default_factory=list)
    """Reads from memory: roots of other kernels, arguments and tuple elements."""


def fuse(
    instructions: Sequence[Instruction], results: Sequence[Instruction], traits: CompilerTraits = DEFAULT
) -> list[Kernel]:
    """The kernels of a body in the order of their roots.

    Args:
        instructions: operands before their users.
        results: always stored.
        traits: of the compiler.
    """
    stored = {*results, *_reduced_in_a_block(instructions, traits.block_elements)}
    if traits.stores_parts:
        stored.update(_in_parts(instructions))
    fusion = _AcceleratorFusion(instructions, stored, by_cost=traits.fuses_by_cost)
    return fusion.by_products(fusion.kernels())


def _reduced_in_a_block(instructions: Sequence[Instruction], block_elements: int) -> Iterator[Instruction]:
    """What one block of threads reduces to one element."""
    for one in instructions:
        if one.name in REDUCTIONS and one.num_elements == 1 and one.operands[0].num_elements <= block_elements:
            yield from one.operands


def _in_parts(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """What XLA:TPU stores since kernels read or write parts of it.

    That is what is padded, concatenated, or sliced in several places or at a distance (not along the last dim), an
    array before and after a slice of it is updated, and one reversed along the last dim.
    """
    readers = users(instructions)
    for one in instructions:
        found = [one] if sum(x.name in PARTS for x in readers[one]) > 1 else []
        if one.name in JOINS:
            found += one.operands
        elif one.name == "dynamic_update_slice":
            found += [one, *(one.operands[at] for at, _ in one.in_place)]
        elif one.eqn is not None and one.name in ("rev", "slice"):
            found += [one] if reverses_lanes(one.eqn) else []
            found += one.operands if set(strided_dims(one.eqn)) - {-1} else []
        for x in found:
            while x.role == "bitcast" or keeps_tiles(x):
                x = x.operands[0]
            if not x.is_constant:
                yield x


class Fusion:
    """Computes producers in the kernels of what reads them, from the last root to the first."""

    def __init__(self, instructions: Sequence[Instruction]):
        self.instructions = instructions
        self.place = {one: k for k, one in enumerate(instructions)}
        self.users = users(instructions)
        self.stored: set[Instruction] = set()
        """What has a kernel of its own even if other kernels compute it too."""

    def growth(self, root: Instruction) -> Growth:
        """What decides which producers join the kernel of a root."""
        raise NotImplementedError

    def kernels(self) -> list[Kernel]:
        readers = {one: set(its_users) for one, its_users in self.users.items()}
        """Producer -> kernels (by root) that read it so far."""
        found = []
        for one in reversed(self.instructions):
            if one in self.stored or readers[one] or not one.computes_operands:
                found.append(self.kernel_of(one, readers))
        return found[::-1]

    def kernel_of(self, root: Instruction, readers: dict[Instruction, set[Instruction]]) -> Kernel:
        """The kernel of a root: producers with no other reader move into it, others are duplicated."""
        members, inside, growth = [root], {root}, self.growth(root)
        seen = computed_operands(root)
        waiting = [-self.place[x] for x in seen]
        heapq.heapify(waiting)
        while waiting:  # the last one first: all that reads it has been seen
            producer = self.instructions[-heapq.heappop(waiting)]
            others = len(readers[producer]) - (root in readers[producer])
            if not growth.takes(producer, inside, is_shared=others > 0):
                continue
            members.append(producer)
            inside.add(producer)
            readers[producer].discard(root)
            for operand in producer.operands:
                readers[operand].add(root)
                if not others:
                    readers[operand].discard(producer)
                if operand not in seen:
                    seen.add(operand)
                    heapq.heappush(waiting, -self.place[operand])
        members.reverse()
        operands = dict.fromkeys(p for m in members for p in m.operands if p not in inside)
        return Kernel(root, members, list(operands))


class Growth(Protocol):
    """One kernel while producers join it, the last one first."""

    def takes(self, producer: Instruction, inside: Collection[Instruction], *, is_shared: bool) -> bool:
        """Whether a producer joins; if so, it has joined.

        Args:
            inside: the members so far.
            is_shared: whether other kernels read it too.
        """
        ...


class _AcceleratorFusion(Fusion):
    def __init__(self, instructions: Sequence[Instruction], stored: Collection[Instruction], *, by_cost: bool):
        super().__init__(instructions)
        self.stored.update(stored)
        """Not computed inside any consumer."""
        self.stored.update(self.ends_of_products())
        if by_cost:
            self.stored.update(PriorityFusion(instructions, self.stored).stored())
        self.once = set() if by_cost else self.costly()

    def growth(self, root: Instruction) -> Growth:
        return _Growth(self, has_product=is_product(root))

    def by_products(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """The kernels in program order, those with a product at its place, such as that of a gradient and its update,
        as soon as their operands are there."""
        made = {kernel.root: k for k, kernel in enumerate(kernels)}
        keys = [
            max((self.place[x] for x in kernel.members if is_product(x)), default=self.place[kernel.root])
            for kernel in kernels
        ]
        waiting = [len(kernel.operands) for kernel in kernels]
        readers: list[list[int]] = [[] for _ in kernels]
        for k, kernel in enumerate(kernels):
            for x in kernel.operands:
                readers[made[x]].append(k)
        ready = [(keys[k], k) for k, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            _, k = heapq.heappop(ready)
            found.append(kernels[k])
            for reader in readers[k]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(ready, (keys[reader], reader))
        return found

    def ends_of_products(self) -> Iterator[Instruction]:
        """The last of the elementwise ops after a product, if several or a product read it: its kernel stores that."""
        for end, inside in product_ends(self.instructions, self.users, self.stored).items():
            readers = self.users[end]
            is_nested = len(readers) == 1 and all(x.elementwise or is_small_product(x) for x in inside)
            if end.elementwise and (len(readers) > 1 or (any(map(is_product, readers)) and not is_nested)):
                yield end

    def costly(self) -> set[Instruction]:
        """What is read faster from memory than computed again by each of several users."""
        found: set[Instruction] = set()
        sources: dict[Instruction, set[Instruction]] = {}
        """Per instruction what must be read to compute it: itself if it is stored."""
        for one in self.instructions:
            sources[one] = {one}
            if is_fusible(one) and one not in self.stored and not is_read_in_part(one):
                reads = self.united_sources(one, sources)
                if self.is_costly(one, reads):
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

    def is_costly(self, one: Instruction, reads: Collection[Instruction]) -> bool:
        """Whether several users move more bytes if each computes it than if one kernel stores it for all."""
        users = self.users[one]
        if len(users) < 2:
            return False
        if one.expensive:
            return True
        read_bytes = sum(x.num_bytes for x in reads)
        if not all(x.computes_operands for x in users):
            return read_bytes > one.num_bytes  # it is stored for one of them anyway
        return len(users) * read_bytes > read_bytes + (len(users) + 1) * one.num_bytes

    def ends_product(self, product: Instruction, inside: Collection[Instruction]) -> bool:
        """Whether a kernel's instructions that depend on a product can run on its tiles, in the product's kernel."""
        return all(
            x.elementwise or x.role == "bitcast" or x.name in AFTER_PRODUCTS for x in self.dependents(product, inside)
        )

    def is_nested(self, product: Instruction, inside: Collection[Instruction]) -> bool:
        """Whether the kernel of another matrix product computes a small one with it."""
        if not is_small_product(product):
            return False
        return all(x.elementwise or x.product is not None for x in self.dependents(product, inside))

    def dependents(self, source: Instruction, inside: Collection[Instruction]) -> set[Instruction]:
        """The instructions inside a kernel that depend on one."""
        found, waiting = set[Instruction](), [source]
        while waiting:
            new = [x for x in self.users[waiting.pop()] if x in inside and x not in found]
            found.update(new)
            waiting += new
        return found


@dataclass(slots=True)
class _Growth:
    fusion: _AcceleratorFusion
    has_product: bool

    def takes(self, producer: Instruction, inside: Collection[Instruction], *, is_shared: bool) -> bool:
        fusion = self.fusion
        if not is_fusible(producer):
            fits = fusion.is_nested if self.has_product else fusion.ends_product
            if not is_product(producer) or is_shared or not fits(producer, inside):
                return False
        if producer in fusion.stored or (producer in fusion.once and is_shared):
            return False
        self.has_product = self.has_product or is_product(producer)
        return True


def product_ends(
    instructions: Sequence[Instruction], readers: Users, stored: Collection[Instruction]
) -> dict[Instruction, set[Instruction]]:
    """The last ops in the kernels of products: those on a product's tiles, as long as no other kernel reads one before.

    Returns:
        Last op -> the product and what runs on its tiles.
    """
    place = {one: k for k, one in enumerate(instructions)}
    found: dict[Instruction, set[Instruction]] = {}
    for product in filter(is_product, instructions):
        end, inside = product, {product}
        unread = {product: len(readers[product])}
        """Those inside that others read -> by how many, which aren't inside yet."""
        waiting = [place[x] for x in readers[product]]
        heapq.heapify(waiting)
        while waiting and len(inside) <= MOST_AFTER_PRODUCT and end not in stored:
            one = instructions[heapq.heappop(waiting)]
            if not (one.elementwise or one.name == "transpose" or one.role == "bitcast"):
                break
            inside.add(one)
            for x in inside.intersection(one.operands):
                unread[x] -= 1
                if not unread[x]:
                    del unread[x]
            new = readers[one]
            unread |= {one: len(new)} if new else {}
            for x in new:
                if place[x] not in waiting:
                    heapq.heappush(waiting, place[x])
            if not unread.keys() - {one}:
                end = one
        found[end] = {x for x in inside if place[x] <= place[end]}
    return found


def computed_operands(root: Instruction) -> set[Instruction]:
    """The operands that a root's kernel may compute: not the array that a scatter adds to."""
    if is_fusible(root):
        return set(root.operands)
    return set(root.operands) - {root.operands[at] for at, _ in root.in_place} if root.fuses_operands else set()


def is_read_in_part(one: Instruction) -> bool:
    """Whether a kernel reads as much as it computes of it, not its whole operand."""
    return one.name in SLICES or (one.name == "gather" and not one.expensive)


def is_product(one: Instruction) -> bool:
    """Whether it is a product whose kernel computes more: what fuses operands and is no scatter."""
    return one.fuses_operands and not updates(one.name)


def is_small_product(one: Instruction) -> bool:
    """Whether it is a product of two matrices that sums few elements."""
    return one.product is not None and one.product.batch == 1 and one.product.summed < FEW_SUMMED


def is_fusible(one: Instruction) -> bool:
    """Whether a kernel may compute it besides its root."""
    return one.role in ("fusible", "bitcast")
