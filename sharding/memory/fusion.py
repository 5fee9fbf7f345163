"""Which instructions are stored, and which are computed inside their consumers, on accelerators.

Consumers compute a fusible producer

- unless it has several, and is expensive, or storing it once moves fewer bytes than reading what each must read, or
  takes less time than computing it in each (`vector_ops`); on GPUs as `priority_fusion` finds;
- also a matrix product, on TPUs, if only they read it: a kernel has at most one, and one that this reads.

`cpu_fusion` has the rules of XLA:CPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..cost.collective_combining import first_ready
from .compiler_traits import DEFAULT, CompilerTraits
from .instruction import Instruction, Users, array_bytes, users
from .primitive_traits import REDUCTIONS, SLICES, element_bytes
from .priority_fusion import PriorityFusion
from .product_ends import is_nested, is_product, product_ends
from .row_normalization import Rows, rows
from .stored_parts import in_parts
from .vector_ops import AGAIN_PER_OP, HIDDEN_OPS, most_ops_again, num_vector_ops

AFTER_PRODUCTS = REDUCTIONS | {"transpose", "dynamic_update_slice"}
"""What a product's kernel computes of its result besides elementwise ops."""
MOST_KERNELS = 4
"""That are counted of those that compute the same."""


@dataclass(slots=True, eq=False)
class Kernel:
    """A fused computation: one stored instruction and those computed inside it."""

    root: Instruction
    members: list[Instruction] = field(default_factory=list)
    """In order, the root last."""
    operands: list[Instruction] = field(default_factory=list)
    """Reads from memory: roots of other kernels, arguments and tuple elements."""

    @property
    def is_view(self) -> bool:
        """Whether it only names an array anew, under another shape."""
        return self.root.role == "bitcast" and all(m.role == "bitcast" for m in self.members)


def dependencies_of(units: Sequence[Sequence[Kernel]]) -> list[list[int]]:
    """Per unit those whose results it reads."""
    owner = {kernel.root: k for k, unit in enumerate(units) for kernel in unit}
    found = [dict.fromkeys(owner[x] for kernel in unit for x in kernel.operands) for unit in units]
    return [[j for j in sources if j != k] for k, sources in enumerate(found)]


def fuse(
    instructions: Sequence[Instruction], results: Sequence[Instruction], traits: CompilerTraits = DEFAULT
) -> list[Kernel]:
    """The kernels of a body in the order of their roots.

    Args:
        instructions: operands before their users.
        results: always stored.
        traits: of the compiler.
    """
    fusion = _fusion(instructions, results, traits)
    return fusion.by_products(fusion.kernels())


def stored_for_several(
    instructions: Sequence[Instruction], results: Sequence[Instruction], traits: CompilerTraits
) -> Iterator[Instruction]:
    """The products and elementwise instructions that are stored since several others read them."""
    fusion = _fusion(instructions, results, traits)
    stored = fusion.stored | fusion.once
    return (one for one in instructions if is_product(one) or (one.elementwise and one in stored))


def _fusion(
    instructions: Sequence[Instruction], results: Sequence[Instruction], traits: CompilerTraits
) -> _AcceleratorFusion:
    readers, stored = users(instructions), {*results, *_reduced_in_a_block(instructions, traits.block_elements)}
    if traits.stores_parts:
        stored.update(in_parts(instructions, readers))
    return _AcceleratorFusion(instructions, readers, stored, traits)


def _reduced_in_a_block(instructions: Sequence[Instruction], block_elements: int) -> Iterator[Instruction]:
    """What one block of threads reduces to one element."""
    for one in instructions:
        if one.name in REDUCTIONS and one.num_elements == 1 and one.operands[0].num_elements <= block_elements:
            yield from one.operands


class Fusion:
    """Computes producers in the kernels of what reads them, from the last root to the first."""

    def __init__(self, instructions: Sequence[Instruction], readers: Users):
        self.instructions = instructions
        self.place = {one: k for k, one in enumerate(instructions)}
        self.users = readers
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
    def __init__(
        self,
        instructions: Sequence[Instruction],
        readers: Users,
        stored: Collection[Instruction],
        traits: CompilerTraits,
    ):
        super().__init__(instructions, readers)
        self.stored.update(stored)
        """Not computed inside any consumer."""
        self.stored.update(one for one in instructions if self.is_read_both_ways(one))
        self.ends = product_ends(instructions, self.users, self.stored)
        """The last ops in the kernels of products."""
        in_rows = rows(instructions, self.users, self.stored, self.ends) if traits.stores_parts else Rows()
        self.stored.update(in_rows.ends)
        self.nested: dict[Instruction, Instruction] = {}
        """Product -> the one whose kernel computes it, too."""
        self.nesting: set[Instruction] = set()
        """The products whose kernels compute another one."""
        forked = self.store_ends_of_products(in_rows.held)
        if traits.fuses_by_cost:
            self.stored.update(PriorityFusion(instructions, self.stored).stored())
        self.once = set() if traits.fuses_by_cost else self.costly()
        self.stored.update(self.once.intersection(forked))

    def is_read_both_ways(self, one: Instruction) -> bool:
        """Whether a product's 16 bits are widened for kernels that do it themselves, and for others, as of a gather."""
        wide = self.users[one]
        if not is_product(one) or one.itemsize != 2 or not all(map(is_widened, wide)):
            return False
        return len({reader.computes_operands for x in wide for reader in self.users[x]}) > 1

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
        order = first_ready(keys, [[made[x] for x in kernel.operands] for kernel in kernels])
        return [kernels[k] for k in order]

    def store_ends_of_products(self, held: Collection[Instruction]) -> list[Instruction]:
        """Stores the last of the elementwise ops after a product, if several or a product read it, unless it is held.

        Returns:
            Those that aren't stored as the product is: if several ops read it, and it is no larger than what it reads.
        """
        found = []
        for end, inside in self.ends.items():
            readers = self.users[end]
            product = min(inside, key=self.place.__getitem__)
            if end in held:
                continue
            if len(readers) == 1 and is_product(readers[0]) and self.nests(product, inside, readers[0]):
                self.nested[product] = readers[0]
                self.nesting.add(readers[0])
                continue
            if not end.elementwise or (len(readers) == 1 and not is_product(readers[0])):
                continue
            narrow = [x.operands[0] for x in inside if is_widened(x) and x.operands[0].itemsize == 2]
            if len(narrow) == 1 and narrow[0] in inside:
                self.stored.update(narrow)
                continue
            largest = max((x.num_elements for x in product.operands), default=0)
            if len(self.users[product]) > 1 and product.num_elements <= largest:
                found.append(end)
            else:
                self.stored.add(end)
        return found

    def nests(self, product: Instruction, inside: Collection[Instruction], reader: Instruction) -> bool:
        """Whether the kernel of a product computes another one, too, which nothing else reads after elementwise ops."""
        if product in self.nesting or reader in self.nesting or len({*reader.operands}) < 2:
            return False
        if not all(x.elementwise for x in inside if x is not product):
            return False
        return is_nested(product, reader, is_read_once=len(self.users[product]) == 1)

    def costly(self) -> set[Instruction]:
        """What is read faster from memory than computed again by each of several users.

        What moves fewer bytes if it is stored counts as a kernel where the time of others is weighed.
        """
        large, _ = self.large_and_slow(())
        large, slow = self.large_and_slow(large)
        return large | slow

    def large_and_slow(self, known: Collection[Instruction]) -> tuple[set[Instruction], set[Instruction]]:
        """What takes more bytes to compute again, and what takes longer, with some instructions known to be stored."""
        large, slow = set[Instruction](), set[Instruction]()
        kernels = self.several_kernels(self.stored.union(known))
        sources: dict[Instruction, set[Instruction]] = {}
        """Per instruction what must be read to compute it: itself if it is stored."""
        for one in self.instructions:
            if is_fusible(one) and one not in self.stored and not is_read_in_part(one):
                reads = self.united_sources(one, sources)
                if self.is_costly(one, reads):
                    large.add(one)
                elif one in kernels and self.is_slow(one, reads, kernels[one]):
                    slow.add(one)
                else:
                    sources[one] = reads
                    continue
            sources[one] = {one}
        return large, slow

    def united_sources(self, one: Instruction, sources: dict[Instruction, set[Instruction]]) -> set[Instruction]:
        """What must be read to compute the operands of an instruction.

        The largest of the sets that nothing else needs is extended: a sum of n arrays, added one by one, takes n steps.
        """
        if len(one.operands) == 1:
            (x,) = one.operands
            return sources.pop(x) if len(self.users[x]) == 1 else {*sources[x]}
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
        read_bytes = sum(x.num_bytes for x in reads)
        if one.expensive:
            return one.name != "convert_element_type" or 2 * read_bytes > 3 * one.num_bytes
        if not all(x.computes_operands for x in users):
            return read_bytes > one.num_bytes  # it is stored for one of them anyway
        return len(users) * read_bytes > read_bytes + (len(users) + 1) * _unrounded_bytes(one)

    def several_kernels(self, known: Collection[Instruction]) -> dict[Instruction, set[Instruction]]:
        """What several users need -> the roots of the kernels that compute it, some of them, if there are several.

        Args:
            known: to be stored.
        """
        found: dict[Instruction, set[Instruction]] = {}
        for one in reversed(self.instructions):
            several = [{user} if user in known or not is_fusible(user) else found[user] for user in self.users[one]]
            found[one] = several[0] if len(several) == 1 else set()
            for roots in several if len(several) > 1 else ():
                if len(found[one]) < MOST_KERNELS:
                    found[one] |= roots
        return {one: roots for one, roots in found.items() if len(self.users[one]) > 1 < len(roots)}

    def is_slow(self, one: Instruction, reads: Collection[Instruction], roots: Collection[Instruction]) -> bool:
        """Whether computing it in each of several kernels takes longer than storing and reading it."""
        again = sum(sorted(AGAIN_PER_OP[is_product(x) or x in self.ends] for x in roots)[1:])
        read_bytes, num_bytes = sum(x.num_bytes for x in reads), _unrounded_bytes(one)
        products = [x.product for x in roots if x.product is not None]
        if len(products) == len(roots):
            most_ops = most_ops_again(one, num_bytes, read_bytes, products)
            return num_vector_ops(one, reads, limit=most_ops) > most_ops
        limit = (len(roots) + 1) * num_bytes - (len(roots) - 1) * read_bytes
        most_ops = limit / (again * max(1, one.num_elements)) + HIDDEN_OPS
        return num_vector_ops(one, reads, limit=most_ops) > most_ops

    def ends_product(self, product: Instruction, inside: Collection[Instruction]) -> bool:
        """Whether a kernel's instructions that depend on a product can run on its tiles, in the product's kernel."""
        return all(
            x.elementwise or x.role == "bitcast" or x.name in AFTER_PRODUCTS for x in self.dependents(product, inside)
        )

    def is_nested(self, product: Instruction, inside: Collection[Instruction]) -> bool:
        """Whether a kernel is that of the product which computes it, too."""
        return self.nested.get(product) in inside

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


def computed_operands(root: Instruction) -> set[Instruction]:
    """The operands that a root's kernel may compute: not the array that a scatter adds to."""
    if is_fusible(root):
        return set(root.operands)
    return set(root.operands) - {root.operands[at] for at, _ in root.in_place} if root.fuses_operands else set()


def _unrounded_bytes(one: Instruction) -> int:
    """Bytes before what is only read in 16 bits is stored so."""
    if one.eqn is None or len(one.eqn.outvars) != 1:
        return one.num_bytes
    return max(one.num_bytes, array_bytes(one.num_elements, element_bytes(one.eqn.outvars[0].aval.dtype)))


def is_read_in_part(one: Instruction) -> bool:
    """Whether a kernel reads as much as it computes of it, not its whole operand."""
    return one.name in SLICES or (one.name == "gather" and not one.expensive)


def is_widened(one: Instruction) -> bool:
    """Whether it is 16 bits in 32."""
    return one.name == "convert_element_type" and one.itemsize == 4


def is_fusible(one: Instruction) -> bool:
    """Whether a kernel may compute it besides its root."""
    return one.role in ("fusible", "bitcast")
