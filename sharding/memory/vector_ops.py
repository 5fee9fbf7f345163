"""How long the vector units of a TPU take for elementwise ops: about, as XLA:TPU's fusion was seen to weigh them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .instruction import Instruction

HIDDEN_OPS = 8
"""On each element that a kernel computes in the time that it takes to read it."""
AGAIN_PER_OP = {False: 0.5, True: 0.12}
"""Bytes that are read in the time of one op on each element; products hide more of it."""
VECTOR_OPS: Mapping[str, int] = {
    **dict.fromkeys("div rem integer_pow log log1p expm1 cbrt".split(), 10),
    **dict.fromkeys("logistic atan2 asin acos pow".split(), 15),
    **dict.fromkeys("erf erfc erf_inv lgamma digamma".split(), 50),
    **dict.fromkeys("sin cos tan".split(), 100),
}
"""Primitives that take more than one instruction of a vector unit -> about how many."""


def num_vector_ops(end: Instruction, reads: Collection[Instruction], *, limit: float) -> int:
    """How many instructions of a vector unit compute an element from what is read, counted up to a limit."""
    found, waiting, count = {end}, [end], 0
    while waiting and count <= limit:
        one = waiting.pop()
        count += VECTOR_OPS.get(one.name, 1) if one.elementwise else 0
        new = [x for x in one.operands if x not in reads and x not in found and x.num_elements >= end.num_elements]
        found.update(new)
        waiting += new
    return count
