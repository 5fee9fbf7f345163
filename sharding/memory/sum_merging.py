"""Partial sums that are added before one all-reduce, as on XLA:TPU and XLA:GPU; see `explain.sum_reassociation`.

The gradient of what several products read, such as the input of `q`, `k` and `v`, is added in the products' kernels,
and one array is all-reduced instead of three.
"""

from __future__ import annotations

from .instruction import Body, Instruction, Users, users
from .primitive_traits import ADDS


def merge_sums(body: Body) -> None:
    """Rewrite a body, its loops and its branches."""
    readers, results = users(body.instructions), {*body.results}
    found: list[Instruction] = []
    merged: set[Instruction] = set()
    for one in body.instructions:
        for inner in one.bodies:
            merge_sums(inner)
        if one.name in ADDS and one.operands and all(_is_read_by_it_alone(x, readers, results) for x in one.operands):
            first, *others = one.operands
            if others and all(x.group == first.group and x.shape == one.shape for x in one.operands):
                inner_sum = _partial_sum(one)
                found.append(inner_sum)
                merged.update(one.operands)
                one.name, one.role, one.elementwise, one.operands = first.name, first.role, False, [inner_sum]
                one.group, one.axes, one.in_place = first.group, first.axes, first.in_place
                one.num_devices = first.num_devices
        found.append(one)
    body.instructions = [one for one in found if one not in merged]


def _is_read_by_it_alone(x: Instruction, readers: Users, results: set[Instruction]) -> bool:
    return x.name == "all-reduce" and x.group is not None and len(readers[x]) == 1 and x not in results


def _partial_sum(one: Instruction) -> Instruction:
    """The sum of what the operands of an addition reduce."""
    partial = [x.operands[0] for x in one.operands]
    facts = {"elementwise": True, "value": one.value, "eqn": one.eqn, "phase": one.phase}
    return Instruction(one.name, "fusible", partial, one.shape, one.num_bytes, **facts)
