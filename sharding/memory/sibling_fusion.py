"""Multi-output fusion: a reduction runs with another reader of its array (openxla/xla, `multi_output_fusion.cc`)."""

from __future__ import annotations

from collections.abc import Sequence

from .fusion import Kernel
from .instruction import Instruction
from .primitive_traits import REDUCTIONS

MIN_BYTES = 2**16
"""Kernels that share smaller arrays are fused, too, but don't matter."""


def fuse_siblings(units: Sequence[list[Kernel]]) -> list[list[Kernel]]:
    """The units in program order, reductions merged into a unit that reads the same array.

    A reduction moves up to the array's last reader before it, or down to the next one, where its operands and readers
    let it. A unit is kernels that run at once.
    """
    place = {kernel.root: k for k, unit in enumerate(units) for kernel in unit}
    first_reader = [len(units)] * len(units)
    readers: dict[Instruction, list[int]] = {}
    for k, unit in enumerate(units):
        for kernel in unit:
            for x in kernel.operands:
                first_reader[place[x]] = min(first_reader[place[x]], k)
        for x in _looped_over(unit):
            readers.setdefault(x, []).append(k)
    merged = [list(unit) for unit in units]
    for siblings in readers.values():
        for before, k, after in zip([None, *siblings], siblings, [*siblings[1:], None], strict=False):
            if len(merged[k]) != 1 or not _is_reduction(units[k][0]):
                continue
            last_operand = max(place[x] for x in units[k][0].operands)
            for sibling in (before, after):
                target = k if sibling is None else place[units[sibling][0].root]
                if target != k and last_operand < target < first_reader[k]:
                    merged[target] += merged[k]
                    merged[k] = []
                    place[units[k][0].root] = target
                    first_reader[target] = min(first_reader[target], first_reader[k])
                    for x in units[k][0].operands:
                        first_reader[place[x]] = min(first_reader[place[x]], target)
                    break
    return [unit for unit in merged if unit]


def _looped_over(unit: Sequence[Kernel]) -> list[Instruction]:
    """The large arrays that a unit reads element by element."""
    if len(unit) != 1 or unit[0].root.role not in ("fusible", "bitcast"):
        return []
    most = max(m.num_elements for m in unit[0].members)
    return [x for x in unit[0].operands if x.num_bytes >= MIN_BYTES and x.num_elements >= most]


def _is_reduction(kernel: Kernel) -> bool:
    """Whether a kernel's result is that of a reduction."""
    return any(m.name in REDUCTIONS and m.num_elements == kernel.root.num_elements for m in kernel.members)
