"""Reshapes that XLA:TPU's tiles make kernels of their own.

A line of elements is stored 1,024 after another, a matrix in tiles of 8 by 128: unless the last dim is 128, a reshape
of one to the other moves every element. It comes after the elementwise ops that follow it, and the sum of all elements
needs none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .instruction import Body, Instruction, Users, users
from .primitive_traits import REDUCTIONS
from .tile_layouts import LANES


def move_reshapes(body: Body) -> None:
    """Makes reshapes from or to one dim kernels of their own, after the elementwise ops that alone read them."""
    readers, results = users(body.instructions), {*body.results}
    moved: dict[Instruction, list[Instruction]] = {}
    for one in body.instructions:
        for inner in one.bodies:
            move_reshapes(inner)
        if one.role == "bitcast" and moves_elements(one.operands[0].shape, one.shape):
            moved |= _moved(one, readers, results)
    body.instructions = [x for one in body.instructions for x in moved.get(one, [one])]
    body.results = [moved.get(one, [one])[-1] for one in body.results]


def moves_elements(source: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a reshape between one dim and several stores the elements in another order."""
    sizes = [[size for size in dims if size > 1] for dims in (source, shape)]
    longer = max(sizes, key=len)
    return sorted(map(len, sizes))[0] == 1 < len(longer) and longer[-1] != LANES


def _moved(
    reshape: Instruction, readers: Users, results: Collection[Instruction]
) -> Mapping[Instruction, list[Instruction]]:
    """What a reshape and the op behind which it moves become; nothing where it stays."""
    chain = [reshape]
    while chain[-1] not in results and len(readers[chain[-1]]) == 1 and _maps(readers[chain[-1]][0], chain[-1]):
        chain.append(readers[chain[-1]][0])
    last = chain[-1]
    if last not in results and all(x.name in REDUCTIONS and x.num_elements == 1 for x in readers[last]):
        return {}
    if last is reshape:
        reshape.role = "unfusible"
        return {}
    after = Instruction("reshape", "unfusible", [last], last.shape, last.num_bytes, value=last.value, eqn=last.eqn)
    for x in readers[last]:
        x.operands = [after if operand is last else operand for operand in x.operands]
    (source,) = reshape.operands
    chain[1].operands = [source if x is reshape else x for x in chain[1].operands]
    for one in chain[1:]:
        one.shape = source.shape
    return {reshape: [], last: [last, after]}


def _maps(one: Instruction, x: Instruction) -> bool:
    """Whether an op computes each element from one of an array, and from nothing larger than an element."""
    return one.elementwise and all(y is x or y.is_constant or y.num_elements == 1 for y in one.operands)
