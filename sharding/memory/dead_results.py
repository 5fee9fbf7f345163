"""Results of loops that nothing reads, which compilers drop with all that only they need (openxla/xla,
`hlo/transforms/while_loop_simplifier.cc`): stacks that a gradient doesn't need, and carries that are only passed on."""

from __future__ import annotations

from collections import defaultdict

from .. import compat
from ..graph.straight_line import num_uses
from .instruction import Body, Instruction, all_instructions

LOOPS = frozenset({"scan", "while"})


def drop_dead_results(body: Body) -> None:
    """Removes them from the loops of a body, and of the bodies inside."""
    loops = [one for one in all_instructions(body) if one.name in LOOPS and one.bodies]
    alive, read = _alive(body, loops)
    for one in loops:
        _keep(one, alive, read[one])
    for outer in (body, *(inner for one in all_instructions(body) for inner in one.bodies)):
        found = []
        for x in outer.instructions:
            source = x.operands[0] if x.role == "tuple-element" else x
            if source.name in LOOPS and source is not x:
                if x.element not in read[source]:
                    continue
                x.element = sorted(read[source]).index(x.element)
            if source in alive:
                found.append(x)
        outer.instructions = found


def _alive(body: Body, loops: list[Instruction]) -> tuple[set[Instruction], dict[Instruction, set[int]]]:
    """What results depend on, and per loop the results that it needs itself or that are read behind it."""
    owner = {x: (one, k + _shift(one)) for one in loops for k, x in enumerate(one.bodies[0].arguments)}
    carries = {one: dict(one.in_place) for one in loops}
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
            loop, at = owner[one]
            waiting.append(loop.operands[at])
            needed = [(loop, carries[loop][at])] if at in carries[loop] else []
        elif one in carries:
            waiting += [*one.operands[: _shift(one)], *one.bodies[0].effects]
            needed = [(one, k) for k in _read_by_condition(one)]
        else:
            waiting += one.operands
            for inner in one.bodies:
                waiting += [*inner.results, *inner.effects]
            if one.role == "tuple-element":
                needed = [(x, one.element) for x in one.operands if x in carries]
        for loop, k in needed:
            read[loop].add(k)
            waiting += [loop.bodies[0].results[k], *(loop.operands[at] for at, result in loop.in_place if result == k)]
    return alive, read


def _shift(loop: Instruction) -> int:
    """The number of operands that only the condition reads."""
    return len(loop.operands) - len(loop.bodies[0].arguments)


def _read_by_condition(loop: Instruction) -> list[int]:
    """The carries that a loop's condition reads."""
    if loop.name != "while":
        return []
    condition = compat.open_jaxpr(loop.eqn.params["cond_jaxpr"])
    uses = num_uses(condition.eqns, condition.outvars)
    return [k for k, x in enumerate(condition.invars[loop.eqn.params["cond_nconsts"] :]) if uses[x]]


def _keep(loop: Instruction, alive: set[Instruction], read: set[int]) -> None:
    """Leaves only some results of a loop, and the operands that it reads or that become results."""
    body, shift, results = loop.bodies[0], _shift(loop), sorted(read)
    carried = {at for at, k in loop.in_place if k in read}
    kept = [
        at for at in range(len(loop.operands)) if at < shift or at in carried or body.arguments[at - shift] in alive
    ]
    place = {at: n for n, at in enumerate(kept)}
    loop.in_place = tuple((place[at], results.index(k)) for at, k in loop.in_place if k in read)
    loop.operands = [loop.operands[at] for at in kept]
    body.arguments = [body.arguments[at - shift] for at in kept if at >= shift]
    body.results = [body.results[k] for k in results]
