"""Multi-output fusion: a reduction runs with another reader of its array (openxla/xla, `multi_output_fusion.cc`)."""

from __future__ import annotations

from collections.abc import Sequence

from .fusion import Kernel
from .instruction import Instruction
from .primitive_traits import REDUCTIONS

MIN_BYTES = 2**16
"""Kernels that share smaller arrays are fused, too, but don't matter."""


def fuse_siblings(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels in program order, reductions with a kernel that reads the same array.

    A reduction moves up to the array's last reader before it, or down to the next one, where its operands and readers
    let it.
    """
    place = {kernel.root: k for k, kernel in enumerate(kernels)}
    first_reader = [len(kernels)] * len(kernels)
    readers: dict[Instruction, list[int]] = {}
    for k, kernel in enumerate(kernels):
        for x in kernel.operands:
            first_reader[place[x]] = min(first_reader[place[x]], k)
        for x in _looped_over(kernel):
            readers.setdefault(x, []).append(k)
    merged = [[kernel] for kernel in kernels]
    for siblings in readers.values():
        for before, k, after in zip([None, *siblings], siblings, [*siblings[1:], None], strict=False):
            if len(merged[k]) != 1 or not _is_reduction(kernels[k]):
                continue
            last_operand = max(place[x] for x in kernels[k].operands)
            for sibling in (before, after):
                target = k if sibling is None else place[kernels[sibling].root]
                if target != k and last_operand < target < first_reader[k]:
                    merged[target] += merged[k]
                    merged[k] = []
                    place[kernels[k].root] = target
                    first_reader[target] = min(first_reader[target], first_reader[k])
                    for x in kernels[k].operands:
                        first_reader[place[x]] = min(first_reader[place[x]], target)
                    break
    return [unit for unit in merged if unit]


def _looped_over(kernel: Kernel) -> list[Instruction]:
    """The large arrays that a kernel reads element by element."""
    if kernel.root.role not in ("fusible", "bitcast"):
        return []
    most = max(m.num_elements for m in kernel.members)
    return [x for x in kernel.operands if x.num_bytes >= MIN_BYTES and x.num_elements >= most]


def _is_reduction(kernel: Kernel) -> bool:
    """Whether a kernel's result is that of a reduction."""
    return any(m.name in REDUCTIONS and m.num_elements == kernel.root.num_elements for m in kernel.members)
