"""Arrays that XLA:GPU computes in the order of dims in which a program returns them, or a loop reads them.

That order goes back through transposes and ops on each element to what computes them: products write their rows and
columns in any order, loops carry arrays in any, and stack rows in any that leaves the last dim last. Nothing is
transposed then; other arguments are as they are read. Loops read weights that they multiply by in any order, too
(openxla/xla, `service/layout_assignment.cc`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .dead_results import LOOPS
from .dim_orders import UNORDERED, permutation
from .instruction import Body, Instruction, Users, users
from .product_layouts import are_adjacent
from .tile_layouts import product_dims

Order = Sequence[int]
"""The dims of an array in the order in which they are stored, from the one whose elements are farthest apart."""


def keep_orders(body: Body) -> None:
    """Makes bitcasts of the transposes before a program's results and before loops that no kernel runs."""
    results = {*body.results}
    for one in _transposes(results):
        if one.operands[0] not in results and any(_writes(x, permutation(one)) for x in _reached(one.operands)):
            one.role = "bitcast"
    _keep_before_loops(body)


def _keep_before_loops(body: Body) -> None:
    for loop in body.instructions:
        for inner in loop.bodies:
            _keep_before_loops(inner)
        if loop.name not in LOOPS or not loop.bodies:
            continue
        readers, shift = users(loop.bodies[0].instructions), len(loop.operands) - len(loop.bodies[0].arguments)
        for argument, x in zip(loop.bodies[0].arguments, loop.operands[shift:], strict=True):
            is_given = permutation(x) and x.role == "fusible" and x.operands[0].role == "argument"
            if is_given and _is_multiplied(argument, readers):
                x.role = "bitcast"


def _is_multiplied(x: Instruction, readers: Users) -> bool:
    """Whether only products read an array, or rows of it."""
    return all(
        one.product is not None
        or ((one.name == "dynamic_slice" or one.role == "bitcast") and _is_multiplied(one, readers))
        for one in readers[x]
    )


def _transposes(arrays: Iterable[Instruction]) -> list[Instruction]:
    """Those from which ops on each element compute some arrays."""
    return [one for one in _reached(arrays) if one.role == "fusible" and permutation(one)]


def _reached(arrays: Iterable[Instruction]) -> set[Instruction]:
    """Some arrays, and those that ops on each element compute them from."""
    waiting, found = [*arrays], set[Instruction]()
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found.add(one)
        if one.elementwise and one.role == "fusible":
            waiting += (y for y in one.operands if y.shape == one.shape and y.name not in UNORDERED)
    return found


def _writes(one: Instruction, order: Order) -> bool:
    """Whether an op writes its result in another order of dims."""
    if one.role == "tuple-element" and one.operands[0].name in LOOPS:
        inside = one.operands[0].bodies[0].results[one.element]
        return inside.name != "dynamic_update_slice" or order[-1] == len(order) - 1
    if one.name != "dot_general" or one.product is None:
        return False
    batch, (rows, columns) = product_dims(one)
    first, start = len(batch[0]), len(batch[0]) + len(rows)
    groups = (range(first, start), range(start, start + len(columns)))
    return start + len(columns) == len(order) and all(are_adjacent(map(order.index, group)) for group in groups)
