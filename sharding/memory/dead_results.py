"""Results of loops and conditionals that nothing reads, which compilers drop with all that only they need (openxla/xla,
`hlo/transforms/while_loop_simplifier.cc` and `service/conditional_simplifier.cc`): stacks that a gradient doesn't need,
and carries that are only passed on."""

from __future__ import annotations

from collections import defaultdict

from .. import compat
from ..graph.straight_line import num_uses
from .instruction import Body, Instruction, all_instructions

LOOPS = frozenset({"scan", "while"})


def drop_dead_results(body: Body) -> None:
    """Removes them from the loops and conditionals of a body, and of the bodies inside."""
    nests = [one for one in all_instructions(body) if one.bodies]
    alive, read = _alive(body, nests)
    place = {one: {k: n for n, k in enumerate(sorted(read[one]))} for one in nests}
    for one in nests:
        _keep(one, alive, place[one])
    for outer in (body, *(inner for one in nests for inner in one.bodies)):
        found = []
        for x in outer.instructions:
            source = x.operands[0] if x.role == "tuple-element" else x
            if source in place and source is not x:
                if x.element not in place[source]:
                    continue
                x.element = place[source][x.element]
            if source in alive:
                found.append(x)
        outer.instructions = found
        _carry_copied(outer)


def _alive(body: Body, nests: list[Instruction]) -> tuple[set[Instruction], dict[Instruction, set[int]]]:
    """What results depend on, and per loop or conditional the results that it needs itself or that are read behind."""
    owner = {x: (one, k + _shift(one)) for one in nests for inner in one.bodies for k, x in enumerate(inner.arguments)}
    carries = {one: dict(one.in_place) for one in nests}
    alive: set[Instruction] = set()
    read: dict[Instruction, set[int]] = defaultdict(set)
    waiting = [*body.results, *body.effects]
    while waiting:
        one = waiting.pop()
        if one in alive:
            continue
        alive.add(one)
        needed: list[tuple[Instruction, int]] = []
        if one in owner:
            nest, at = owner[one]
            waiting.append(nest.operands[at])
            needed = [(nest, carries[nest][at])] if at in carries[nest] else []
        elif one in carries:
            waiting += one.operands[: _shift(one)]
            waiting += [x for inner in one.bodies for x in inner.effects]
            needed = [(one, k) for k in _read_by_condition(one)]
        else:
            waiting += one.operands
            if one.role == "tuple-element":
                needed = [(x, one.element) for x in one.operands if x in carries]
        for nest, k in needed:
            read[nest].add(k)
            waiting += [inner.results[k] for inner in nest.bodies]
            waiting += [nest.operands[at] for at, result in nest.in_place if result == k]
    return alive, read


def _shift(nest: Instruction) -> int:
    """The number of operands that only the condition reads, or that choose the branch."""
    return len(nest.operands) - len(nest.bodies[0].arguments)


def _read_by_condition(loop: Instruction) -> list[int]:
    """The carries that a loop's condition reads."""
    if loop.name != "while":
        return []
    condition = compat.open_jaxpr(loop.eqn.params["cond_jaxpr"])
    uses = num_uses(condition.eqns, condition.outvars)
    return [k for k, x in enumerate(condition.invars[loop.eqn.params["cond_nconsts"] :]) if uses[x]]


def _keep(nest: Instruction, alive: set[Instruction], place: dict[int, int]) -> None:
    """Leaves only some results of a loop or conditional, and the operands that it reads or that become results.

    Args:
        place: index of each of these results -> its new index.
    """
    shift, carried = _shift(nest), {at for at, k in nest.in_place if k in place}
    kept = [
        at
        for at in range(len(nest.operands))
        if at < shift or at in carried or any(inner.arguments[at - shift] in alive for inner in nest.bodies)
    ]
    new = {at: n for n, at in enumerate(kept)}
    nest.in_place = tuple((new[at], place[k]) for at, k in nest.in_place if k in place)
    nest.operands = [nest.operands[at] for at in kept]
    for inner in nest.bodies:
        inner.arguments = [inner.arguments[at - shift] for at in kept if at >= shift]
        inner.results = [inner.results[k] for k in place]


def _carry_copied(body: Body) -> None:
    """Lets loops carry arrays of which they carried copies, if those that carried them no longer do."""
    carried: set[Instruction] = set()
    for one in body.instructions:
        for at, _ in one.in_place:
            x = one.operands[at]
            source = x.operands[0] if one.bodies and x.name == "copy" else x
            if source.role != "argument" and source not in carried:
                one.operands[at] = source
            carried.add(one.operands[at])
