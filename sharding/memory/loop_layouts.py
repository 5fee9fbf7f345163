"""Layouts of what loops return, as XLA:TPU chooses them: as it is transposed.

Each iteration writes so, and no kernel transposes the whole: what a mapped scan stacks, for example.
"""

from __future__ import annotations

from .instruction import Body, Instruction, users

LOOPS = frozenset({"scan", "while"})


def transpose_in_loops(body: Body) -> None:
    """Makes bitcasts of the transposes of what a loop returns, if there is one order."""
    if not any(one.bodies for one in body.instructions):
        return
    readers, results = users(body.instructions), {*body.results}
    for one in body.instructions:
        for inner in one.bodies:
            transpose_in_loops(inner)
        if one.role == "tuple-element" and one.operands[0].name in LOOPS and one not in results:
            transposes = [x for x in readers[one] if _order(x) is not None]
            if len({_order(x) for x in transposes}) == 1:
                for x in transposes:
                    x.role, x.elementwise = "bitcast", False


def _order(x: Instruction) -> tuple[int, ...] | None:
    """Of the dims of a transpose; None of other ops."""
    return x.eqn.params.get("permutation") if x.name == "transpose" and x.eqn is not None else None
