"""Partial sums that are added before one all-reduce, as on XLA:TPU and XLA:GPU; see `explain.sum_reassociation`.

The gradient of what several products read, such as the input of `q`, `k` and `v`, is added in the products' kernels,
and one array is all-reduced instead of three. What the iterations of a loop add up, such as the gradient of a weight
that all of them read, is all-reduced behind the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .instruction import Body, Instruction, Users, users
from .primitive_traits import ADDS


def merge_sums(body: Body) -> None:
    """Rewrite a body, its loops and its branches."""
    for one in body.instructions:
        for inner in one.bodies:
            merge_sums(inner)
    _move_behind_loops(body)
    readers, results = users(body.instructions), {*body.results}
    found: list[Instruction] = []
    merged: set[Instruction] = set()
    for one in body.instructions:
        sums = [_reduced(x, readers, results) for x in one.operands] if one.name in ADDS else []
        reduced = [x for x in sums if x is not None]
        if len(reduced) > 1 and len(reduced) == len(sums):
            first = reduced[0]
            if all(x.group == first.group for x in reduced) and all(x.shape == one.shape for x in one.operands):
                inner_sum = _partial_sum(one)
                found.append(inner_sum)
                merged.update(reduced)
                one.name, one.role, one.elementwise, one.operands = first.name, first.role, False, [inner_sum]
                one.group, one.axes, one.in_place = first.group, first.axes, first.in_place
                one.num_devices = first.num_devices
        found.append(one)
    body.instructions = [one for one in found if one not in merged]


def _is_read_by_it_alone(x: Instruction, readers: Users, results: set[Instruction]) -> bool:
    return x.name == "all-reduce" and x.group is not None and len(readers[x]) == 1 and x not in results


def _reduced(x: Instruction, readers: Users, results: set[Instruction]) -> Instruction | None:
    """The all-reduce of which an array is a view, if nothing else reads it; None if there is none."""
    while x.role == "bitcast" and len(readers[x]) == 1 and x not in results:
        x = x.operands[0]
    return x if _is_read_by_it_alone(x, readers, results) else None


def _partial_sum(one: Instruction) -> Instruction:
    """The sum of what the operands of an addition reduce, of which they may be views."""
    partial = []
    for x in one.operands:
        source, view = x, None
        while source.role == "bitcast":
            source, view = source.operands[0], source
        if view is None:
            partial.append(source.operands[0])
        else:
            view.operands = source.operands[:1]
            partial.append(x)
    facts = {"elementwise": True, "value": one.value, "eqn": one.eqn, "phase": one.phase}
    return Instruction(one.name, "fusible", partial, one.shape, one.num_bytes, **facts)


def _move_behind_loops(body: Body) -> None:
    """All-reduces sums of a body's loops behind them (openxla/xla, `service/while_loop_all_reduce_code_motion.cc`)."""
    moved: dict[tuple[Instruction, int], Instruction] = {}
    reduced: dict[Instruction, Instruction] = {}
    found: list[Instruction] = []
    for one in body.instructions:
        if reduced:
            one.operands = [reduced.get(x, x) for x in one.operands]
        found.append(one)
        if one.name in ("scan", "while") and len(one.bodies) == 1:
            moved |= {(one, k): inner for k, inner in _added_up(one)}
        elif one.role == "tuple-element" and (one.operands[0], one.element) in moved:
            inner = moved[one.operands[0], one.element]
            behind = dataclasses.replace(inner, operands=[one], value=one.value)
            found.append(behind)
            reduced[one] = behind
    body.instructions = found
    body.results = [reduced.get(x, x) for x in body.results]


def _added_up(loop: Instruction) -> Iterator[tuple[int, Instruction]]:
    """Takes the all-reduces out of a loop of what is only added to a carry; their carries, and they."""
    (body,) = loop.bodies
    shift = len(loop.operands) - len(body.arguments)
    readers, results = users(body.instructions), {*body.results}
    for at, k in loop.in_place:
        total, carry = body.results[k], body.arguments[at - shift]
        if total.name not in ADDS or carry not in total.operands or len(readers[carry]) != 1:
            continue
        rest = [x for x in total.operands if x is not carry]
        if len(rest) == 1 and not readers[total] and _is_read_by_it_alone(rest[0], readers, results):
            total.operands = [rest[0].operands[0] if x is rest[0] else x for x in total.operands]
            body.instructions.remove(rest[0])
            yield k, rest[0]
