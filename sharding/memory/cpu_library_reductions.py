"""Large reductions, which XLA:CPU hands to a library together with the elementwise ops around them.

After openxla/xla, `backends/cpu/transforms/library_rewriter.cc` and `backends/cpu/ynn_support.cc`: last reduction
first, a reduction fuses the producers that only it uses, as far as the library supports them, and then its only user.
Operands and result of such a kernel are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .instruction import Instruction

MIN_ELEMENTS = 4096
"""The library does not run an op whose operands and result are all smaller."""

SUPPORTED = frozenset(
    """
    abs add add_any ceil convert convert_element_type cos div erf exp expm1 floor integer_pow log log1p logistic max min
    mul neg pow round rsqrt sign sin sqrt square stop_gradient sub tan tanh
    """.split()
)
SHAPE_OPS = frozenset("broadcast_in_dim expand_dims reshape squeeze transpose".split())


def is_large(one: Instruction) -> bool:
    """Whether an op's result or one of its operands has at least `MIN_ELEMENTS`."""
    return any(x.num_elements >= MIN_ELEMENTS for x in (one, *one.operands))


def groups(
    instructions: Sequence[Instruction],
    users: Mapping[Instruction, Sequence[Instruction]],
    results: set[Instruction],
) -> dict[Instruction, set[Instruction]]:
    """Root -> the members of each kernel that the library runs, including the root.

    Args:
        instructions: in order.
        users: of each instruction.
        results: always stored.
    """
    taken: set[Instruction] = set()
    found: dict[Instruction, set[Instruction]] = {}
    for start in reversed(instructions):
        if not start.is_library_reduction or start in taken:
            continue
        members, root = {start}, start
        while True:
            size = len(members)
            _add_producers(members, users, taken, results)
            below = users[root]
            if len(below) == 1 and root not in results and _is_supported(below[0]) and below[0] not in taken:
                root = below[0]
                members.add(root)
            if len(members) == size:
                break
        taken |= members
        found[root] = members
    return found


def _add_producers(
    members: set[Instruction],
    users: Mapping[Instruction, Sequence[Instruction]],
    taken: set[Instruction],
    results: set[Instruction],
) -> None:
    waiting = [x for m in members for x in m.operands]
    while waiting:
        one = waiting.pop()
        if one in members or one in taken or one in results or not _is_supported(one):
            continue
        if all(user in members for user in users[one]):
            members.add(one)
            waiting += one.operands


def _is_supported(one: Instruction) -> bool:
    if one.name in SHAPE_OPS:
        return True
    return one.name in SUPPORTED and len(one.operands) <= 2 and is_large(one)
