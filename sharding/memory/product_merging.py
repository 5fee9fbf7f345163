"""Matrix products that share an operand and run as one, whose results are slices of its result, as on XLA:GPU.

Products with the same dims, of which none depends on another, are merged in the program's order if one of each two is
small (openxla/xla, `hlo/transforms/simplifiers/dot_merger.cc`; compiled programs show what counts as small). The buffer
of merged `q`, `k` and `v` lives as long as any of them, and one product hides less latency than three.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cost.collective_combining import postorder
from .instruction import Body, Instruction

MOST_BYTES = 64 * 2**20
"""Of the result of a small product and the operand that it doesn't share together."""


def merge_products(body: Body) -> None:
    """Rewrite a body, its loops and its branches."""
    products: list[Instruction] = []
    needs: list[int] = []
    """Per product a bit for each that it depends on, and its own."""
    needed: dict[Instruction, int] = {}
    candidates: dict[object, tuple[int, list[int]]] = {}
    for one in body.instructions:
        for inner in one.bodies:
            merge_products(inner)
        needed[one] = 0
        for x in one.operands:
            needed[one] |= needed[x]
        if one.name == "dot_general" and len(one.operands) == 2:
            needed[one] |= 1 << len(products)
            kind = str(one.eqn.params["dimension_numbers"]), one.itemsize, *(x.itemsize for x in one.operands)
            for side, x in enumerate(one.operands):
                candidates.setdefault((x, side, *kind), (side, []))[1].append(len(products))
            products.append(one)
            needs.append(needed[one])
    merged: list[Instruction] = []
    for side, alike in candidates.values():
        left = [n for n in alike if products[n].name == "dot_general"]  # others are slices by now
        while len(left) > 1:
            sizes = [products[n].num_bytes + products[n].operands[1 - side].num_bytes for n in left]
            group = _first_group(left, sizes, needs)
            left = [n for n in left if n not in group]
            if len(group) > 1:
                merged.append(_merged([products[n] for n in group], side))
                _unite(group, needs)
    if merged:
        instructions = [*body.instructions, *merged]
        place = {one: k for k, one in enumerate(instructions)}
        order = postorder(range(len(instructions)), [[place[x] for x in one.operands] for one in instructions])
        body.instructions = [instructions[k] for k in order]


def _first_group(left: Sequence[int], num_bytes: Sequence[int], needs: Sequence[int]) -> list[int]:
    """The first product and those after it that run with it."""
    group, smallest = [left[0]], num_bytes[0]
    for n, size in zip(left[1:], num_bytes[1:], strict=True):
        is_independent = all(not needs[m] >> n & 1 and not needs[n] >> m & 1 for m in group)
        if is_independent and min(smallest, size) <= MOST_BYTES:
            group.append(n)
            smallest = min(smallest, size)
    return group


def _unite(group: Sequence[int], needs: list[int]) -> None:
    """What depends on one product of a group depends on all of it, and on what that needs."""
    mask = sum(1 << n for n in group)
    united = 0
    for n in group:
        united |= needs[n]
    needs[:] = [needed | united if needed & mask else needed for needed in needs]


def _merged(products: Sequence[Instruction], side: int) -> Instruction:
    """One product; those given become its slices."""
    first = products[0]
    operands = [*first.operands, *(one.operands[1 - side] for one in products[1:])]
    count, num_bytes = sum(one.num_elements for one in products), sum(one.num_bytes for one in products)
    made = Instruction(first.name, first.role, operands, (count,), num_bytes, eqn=first.eqn, phase=first.phase)
    for one in products:
        one.name, one.role, one.operands = "slice", "fusible", [made]
    return made
