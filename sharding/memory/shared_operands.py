"""Matrix products that are slices of one which reads the operand they share, as on XLA:GPU (`cost.product_merging`).

The buffer of merged `q`, `k` and `v` lives as long as any of them, and one product hides less latency than three.
"""

from __future__ import annotations

from ..cost.product_merging import Product, merged_products, topological_order
from .instruction import Body, Instruction


def merge_products(body: Body) -> None:
    """Rewrite a body, its loops and its branches."""
    for one in body.instructions:
        for inner in one.bodies:
            merge_products(inner)
    place = {one: k for k, one in enumerate(body.instructions)}
    dots = [one for one in body.instructions if one.name == "dot_general" and len(one.operands) == 2]
    number = {one: k for k, one in enumerate(dots)}
    needed: dict[Instruction, int] = {}
    for one in body.instructions:
        needed[one] = 1 << number[one] if one in number else 0
        for x in one.operands:
            needed[one] |= needed[x]
    groups = merged_products([_product(one, place, needed[one]) for one in dots])
    for members, side in groups:
        body.instructions.append(_merged([dots[n] for n in members], side))
    if groups:
        place = {one: k for k, one in enumerate(body.instructions)}
        order = topological_order([[place[x] for x in one.operands] for one in body.instructions])
        body.instructions = [body.instructions[k] for k in order]


def _product(one: Instruction, place: dict[Instruction, int], needs: int) -> Product:
    lhs, rhs = one.operands
    kind = str(one.eqn.params["dimension_numbers"]), one.itemsize, lhs.itemsize, rhs.itemsize
    sizes = lhs.num_bytes, rhs.num_bytes
    return Product(
        operands=(place[lhs], place[rhs]), operand_bytes=sizes, result_bytes=one.num_bytes, kind=kind, needs=needs
    )


def _merged(dots: list[Instruction], side: int) -> Instruction:
    """One product; those given become its slices."""
    first = dots[0]
    operands = [*first.operands, *(one.operands[1 - side] for one in dots[1:])]
    count, num_bytes = sum(one.num_elements for one in dots), sum(one.num_bytes for one in dots)
    made = Instruction(first.name, first.role, operands, (count,), num_bytes, eqn=first.eqn, phase=first.phase)
    for one in dots:
        one.name, one.role, one.operands = "slice", "fusible", [made]
    return made
