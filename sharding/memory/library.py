"""Large reductions, which XLA:CPU gives to a library together with the elementwise ops around them.

After openxla/xla, `backends/cpu/transforms/library_rewriter.cc` and `backends/cpu/ynn_support.cc`: last reduction
first, a reduction takes in what it alone reads, as far as the library knows it, and then what alone reads it. What
such a kernel reads is stored, and so is what it makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .instruction import Instruction

MIN_ELEMENTS = 4096
"""Of an array that an op reads or makes; the library is not asked for less."""

KNOWN = frozenset(
    """
    abs add add_any ceil convert convert_element_type cos div erf exp expm1 floor integer_pow log log1p logistic max min
    mul neg pow round rsqrt sign sin sqrt square stop_gradient sub tan tanh
    """.split()
)
SHAPED = frozenset("broadcast_in_dim expand_dims reshape squeeze transpose".split())


def is_large(one: Instruction) -> bool:
    """Whether an op reads or makes an array that is worth the library's call."""
    return any(x.num_elements >= MIN_ELEMENTS for x in (one, *one.operands))


def groups(
    instructions: Sequence[Instruction],
    users: Mapping[Instruction, Sequence[Instruction]],
    results: set[Instruction],
) -> dict[Instruction, set[Instruction]]:
    """Root -> the members of each kernel that the library runs, the root among them.

    Args:
        instructions: in order.
        users: of each instruction.
        results: stored whatever reads them.
    """
    taken: set[Instruction] = set()
    found: dict[Instruction, set[Instruction]] = {}
    for start in reversed(instructions):
        if not start.by_library or start in taken:
            continue
        members, root = {start}, start
        while True:
            size = len(members)
            _grow_up(members, users, taken, results)
            below = users[root]
            if len(below) == 1 and root not in results and _is_known(below[0]) and below[0] not in taken:
                root = below[0]
                members.add(root)
            if len(members) == size:
                break
        taken |= members
        found[root] = members
    return found


def _grow_up(
    members: set[Instruction],
    users: Mapping[Instruction, Sequence[Instruction]],
    taken: set[Instruction],
    results: set[Instruction],
) -> None:
    waiting = [x for m in members for x in m.operands]
    while waiting:
        one = waiting.pop()
        if one in members or one in taken or one in results or not _is_known(one):
            continue
        if all(user in members for user in users[one]):
            members.add(one)
            waiting += one.operands


def _is_known(one: Instruction) -> bool:
    if one.name in SHAPED:
        return True
    return one.name in KNOWN and len(one.operands) <= 2 and is_large(one)
