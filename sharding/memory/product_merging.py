"""Matrix products that share an operand and run as one, whose results are slices of its result, as on XLA:GPU.

Products with the same dims, of which none depends on another, are merged in the program's order if one of each two is
small (openxla/xla, `hlo/transforms/simplifiers/dot_merger.cc`; compiled programs show what counts as small). The buffer
of merged `q`, `k` and `v` lives as long as any of them, and one product hides less latency than three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..cost.collective_combining import postorder
from .instruction import Body, Instruction, users

MOST_BYTES = 64 * 2**20
"""Of the result of a small product and the operand that it doesn't share together."""


def merge_products(body: Body) -> None:
    """Rewrite a body, its loops and its branches."""
    for one in body.instructions:
        for inner in one.bodies:
            merge_products(inner)
    candidates = _candidates(body)
    shared = {one for _, alike in candidates for one in alike}
    products = _Products([one for one in body.instructions if one in shared], body)
    merged: list[Instruction] = []
    for side, alike in candidates:
        left = products.bits(one for one in alike if one.name == "dot_general")  # others are slices by now
        while left & (left - 1):
            group = products.first_group(left, side)
            left &= ~products.bits(group)
            if len(group) > 1:
                products.unite(group)
                merged.append(_merged(group, side))
    if merged:
        instructions = [*body.instructions, *merged]
        place = {one: k for k, one in enumerate(instructions)}
        order = postorder(range(len(instructions)), [[place[x] for x in one.operands] for one in instructions])
        body.instructions = [instructions[k] for k in order]


def _candidates(body: Body) -> list[tuple[int, list[Instruction]]]:
    """Products of the same dims with a common operand, each list with the index of that operand."""
    found: dict[object, tuple[int, list[Instruction]]] = {}
    for one in body.instructions:
        if one.name == "dot_general" and len(one.operands) == 2:
            kind = str(one.eqn.params["dimension_numbers"]), one.itemsize, *(x.itemsize for x in one.operands)
            for side, x in enumerate(one.operands):
                found.setdefault((x, side, *kind), (side, []))[1].append(one)
    return [(side, alike) for side, alike in found.values() if len(alike) > 1]


class _Products:
    """Products in the order of a body, and which depend on which. Sets of products are integers with a bit for each."""

    def __init__(self, products: Sequence[Instruction], body: Body):
        self.products = products
        self.number = {one: n for n, one in enumerate(products)}
        self.needs = self.reached(body.instructions, {one: one.operands for one in body.instructions})
        """Per product those that it depends on, and its own bit."""
        self.readers = self.reached(body.instructions[::-1], users(body.instructions))
        """Per product those that depend on it, and its own bit."""
        self.left = (1 << len(products)) - 1
        """Those that are in no group yet: what depends on the others is not asked again."""

    def reached(
        self, instructions: Sequence[Instruction], neighbours: Mapping[Instruction, Sequence[Instruction]]
    ) -> list[int]:
        """Per product those that a walk along the neighbours of instructions meets."""
        found: dict[Instruction, int] = {}
        for one in instructions:
            found[one] = 1 << self.number[one] if one in self.number else 0
            for x in neighbours[one]:
                found[one] |= found[x]
        return [found[one] for one in self.products]

    def bits(self, products: Iterable[Instruction]) -> int:
        """The set of some products."""
        found = 0
        for one in products:
            found |= 1 << self.number[one]
        return found

    def first_group(self, left: int, side: int) -> list[Instruction]:
        """The first of some products and those after it that run with it."""
        group: list[Instruction] = []
        smallest = 0
        while left:
            n = (left & -left).bit_length() - 1
            left ^= 1 << n
            one = self.products[n]
            num_bytes = one.num_bytes + one.operands[1 - side].num_bytes
            if not group or min(smallest, num_bytes) <= MOST_BYTES:
                smallest = min(smallest, num_bytes) if group else num_bytes
                group.append(one)
                left &= ~(self.needs[n] | self.readers[n])
        return group

    def unite(self, group: Sequence[Instruction]) -> None:
        """What depends on one product of a group depends on all of it, and on what that needs."""
        united = some = 0
        every = -1
        for one in group:
            n = self.number[one]
            self.left &= ~(1 << n)
            united |= self.needs[n]
            some |= self.readers[n]
            every &= self.readers[n]
        for n in _numbers(some & ~every & self.left):  # the others need all of it already
            for m in _numbers(united & ~self.needs[n] & self.left):
                self.readers[m] |= 1 << n
            self.needs[n] |= united


def _numbers(products: int) -> Iterator[int]:
    """The numbers of the products in a set."""
    while products:
        low = products & -products
        yield low.bit_length() - 1
        products ^= low


def _merged(products: Sequence[Instruction], side: int) -> Instruction:
    """One product; those given become its slices."""
    first = products[0]
    operands = [*first.operands, *(one.operands[1 - side] for one in products[1:])]
    count, num_bytes = sum(one.num_elements for one in products), sum(one.num_bytes for one in products)
    made = Instruction(first.name, first.role, operands, (count,), num_bytes, eqn=first.eqn, phase=first.phase)
    sizes = [one.product for one in products if one.product is not None]
    if len(sizes) == len(products):
        name = "rows" if side else "columns"
        made.product = replace(sizes[0], **{name: sum(getattr(one, name) for one in sizes)})
    for one in products:
        one.name, one.role, one.operands, one.product = "slice", "fusible", [made], None
    return made
