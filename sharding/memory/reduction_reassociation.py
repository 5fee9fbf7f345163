"""Partial sums that are added before one reduction, as XLA reassociates them on accelerators.

Where all-reduces or reduce-scatters over the same devices are only added, XLA adds their operands and reduces the sum
(openxla/xla, `service/all_reduce_reassociate.cc`): the gradients that `q`, `k` and `v` send back are one array.
"""

from __future__ import annotations

from dataclasses import replace

from ..cost import SUMS
from .instruction import Body, Instruction, users


def add_before_reducing(body: Body) -> None:
    """Rewrite a body, its loops and its branches, so that sums of reductions over devices are reductions of sums."""
    readers, results = users(body.instructions), set(body.results)
    rewritten: list[Instruction] = []
    for one in body.instructions:
        for inner in one.bodies:
            add_before_reducing(inner)
        if one.name in ("add", "add_any") and _are_partial(one.operands):
            if all(len(readers[x]) == 1 and x not in results for x in one.operands):
                rewritten.append(_reduced_later(one))
        rewritten.append(one)
    body.instructions = rewritten


def _are_partial(operands: list[Instruction]) -> bool:
    """Whether two arrays are reduced over the same devices, and scattered along the same dim if at all."""
    if len(operands) != 2 or any(x.name not in SUMS or x.role != "unfusible" for x in operands):
        return False
    first, second = operands
    alike = first.group is not None and first.group == second.group
    return alike and first.shape == second.shape and first.operands[0].shape == second.operands[0].shape


def _reduced_later(addition: Instruction) -> Instruction:
    """The addition of the partial sums; the one given becomes its reduction."""
    first, second = addition.operands
    whole = first.operands[0]
    partial = replace(
        addition, operands=[whole, second.operands[0]], shape=whole.shape, num_bytes=whole.num_bytes, value=None
    )
    addition.name, addition.role, addition.elementwise = first.name, first.role, False
    addition.operands, addition.group, addition.axes = [partial], first.group, first.axes
    return partial
