"""Sums of an array and a scatter into zeros, which XLA scatters into the array (openxla/xla,
`hlo/transforms/simplifiers/algebraic_simplifier.cc`): the gradient of logits of which one each is read."""

from __future__ import annotations

from .instruction import Body, Instruction, users
from .primitive_traits import ADDS

SCATTER = "scatter-add"


def fold_scatters(body: Body) -> None:
    """Rewrite a body, its loops and its branches."""
    for one in body.instructions:
        for inner in one.bodies:
            fold_scatters(inner)
    if not any(one.name == SCATTER for one in body.instructions):
        return
    alive, results = body.live_instructions(), {*body.results}
    readers = users(alive)
    for one in alive:
        if one.name not in ADDS or len({*one.operands}) != 2:
            continue
        for other, scatter in (one.operands, one.operands[::-1]):
            if _adds_to_zeros(scatter) and readers[scatter] == [one] and scatter not in results:
                one.name, one.role, one.eqn, one.elementwise = scatter.name, scatter.role, scatter.eqn, False
                one.operands, one.in_place = [other, *scatter.operands[1:]], scatter.in_place
                one.fuses_operands = scatter.fuses_operands
                break


def _adds_to_zeros(one: Instruction) -> bool:
    """Whether it scatters into a constant, or into a copy of one that another op updates too."""
    if one.name != SCATTER:
        return False
    base = one.operands[0]
    base = base.operands[0] if base.name == "copy" else base
    return base.is_constant
