"""Layouts of what loops read and return, as XLA:TPU chooses them: as it is transposed.

Each iteration reads and writes so, and no kernel transposes the whole: what a mapped scan reads and stacks, for
example. Rows that are read keep their last dim, and are not rounded before for products; the dim of the iterations is
never the last one of a stack.
"""

from __future__ import annotations

from .dead_results import LOOPS
from .dim_orders import permutation
from .instruction import Body, Instruction, users


def transpose_in_loops(body: Body) -> None:
    """Makes bitcasts of the transposes of what a loop returns, if there is one order, and of what one loop reads."""
    if not any(one.bodies for one in body.instructions):
        return
    readers, results = users(body.instructions), {*body.results}
    for one in body.instructions:
        for inner in one.bodies:
            transpose_in_loops(inner)
        if one.role == "tuple-element" and one.operands[0].name in LOOPS and one not in results:
            transposes = [x for x in readers[one] if permutation(x)[-1:] not in ((), (0,))]
            if len({permutation(x) for x in transposes}) == 1:
                for x in transposes:
                    _make_bitcast(x)
        elif permutation(one)[-1:] == (len(one.shape) - 1,) and one not in results:
            is_rounded = one.itemsize < one.operands[0].itemsize
            if not is_rounded and sum(x.name in LOOPS for x in readers[one]) == 1:
                _make_bitcast(one)


def _make_bitcast(x: Instruction) -> None:
    x.role, x.elementwise = "bitcast", False
