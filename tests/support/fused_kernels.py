"""Instructions by hand, and what holds for the kernels of any program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharding.memory.fusion import Kernel
from sharding.memory.instruction import Instruction

BIG = (64, 64)


def make(
    name: str, *operands: Instruction, shape: tuple[int, ...] = BIG, role: Any = "fusible", **facts: Any
) -> Instruction:
    """An instruction of float32."""
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    return Instruction(name, role, list(operands), shape, 4 * count, **facts)


def argument(name: str = "x", shape: tuple[int, ...] = BIG) -> Instruction:
    return make(name, role="argument", shape=shape)


def by_root(kernels: Sequence[Kernel]) -> dict[str, list[str]]:
    """Name of each stored instruction but arguments -> those computed inside its kernel."""
    return {k.root.name: [m.name for m in k.members if m is not k.root] for k in kernels if k.root.role != "argument"}


def check_all_computed(kernels: Sequence[Kernel], alive: Sequence[Instruction], results: Sequence[Instruction]) -> None:
    """Members read members or stored arrays, all that kernels read is stored, and nothing is computed for no one."""
    roots = {k.root for k in kernels}
    assert roots.issuperset(results)
    for k in kernels:
        assert k.members[-1] is k.root and roots.issuperset(k.operands)
        assert all(x in k.members[:n] or x in k.operands for n, m in enumerate(k.members) for x in m.operands)
        read = {x for m in k.members for x in m.operands}
        assert read.issuperset(k.members[:-1]) and read.issuperset(k.operands)
    assert {m for k in kernels for m in k.members} == {*alive}
