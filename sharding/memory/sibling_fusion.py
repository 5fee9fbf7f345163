"""Kernels that XLA:TPU runs as one since they read the same array, or one reads the other's.

These are a reduction and the kernel that makes its array, or another reader of it, and elementwise kernels such as
those of a weight and of its moments. `multi_output_fusion` has the rules of XLA:GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from .fusion import Kernel
from .instruction import Instruction
from .primitive_traits import REDUCTIONS

MIN_BYTES = 2**16
"""Kernels that share smaller arrays are fused, too, but don't matter."""


def fuse_siblings(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels in a topological order, reductions with the kernel that makes their array or one that reads it.

    A reduction moves up to the array's last reader before it, or down to the next one, where its operands and readers
    let it. Elementwise kernels move down to the next one that reads the same array, and makes one of their shape, also
    if it reads theirs. All others stay in program order.

    Args:
        kernels: in program order.
    """
    found = _Units(kernels)
    readers: dict[Instruction, list[int]] = {}
    for k, kernel in enumerate(kernels):
        for x in _looped_over(kernel):
            readers.setdefault(x, []).append(k)
    for siblings in readers.values():
        for before, k, after in zip([None, *siblings], siblings, [*siblings[1:], None], strict=False):
            if not _is_reduction(kernels[k]) or found.join_maker(k) or len(found.units[k]) != 1:
                continue
            for sibling in (before, after):
                target = k if sibling is None else found.owner[kernels[sibling].root]
                if target != k and found.join(k, target):
                    break
    for siblings in readers.values():
        alike: dict[tuple[int, ...], Instruction] = {}
        """Shape -> the root of the next kernel that makes one."""
        for root in [kernels[k].root for k in reversed(siblings) if kernels[k].root.elementwise]:
            after = alike.get(root.shape)
            if after is None or not found.join_reader(found.owner[root], found.owner[after]):
                alike[root.shape] = root
    return [unit for unit in found.units if unit]


class _Units:
    """Kernels that run at once, under the index of one of them, in a topological order."""

    def __init__(self, kernels: Sequence[Kernel]):
        self.units = [[kernel] for kernel in kernels]
        self.owner = {kernel.root: k for k, kernel in enumerate(kernels)}
        """The unit of each root."""
        self.read_by: dict[Instruction, list[Instruction]] = {}
        """Root -> the roots of the kernels that read it."""
        for kernel in kernels:
            for x in kernel.operands:
                self.read_by.setdefault(x, []).append(kernel.root)

    def sources(self, unit: int) -> set[int]:
        """The units whose results a unit reads."""
        return {self.owner[x] for kernel in self.units[unit] for x in kernel.operands} - {unit}

    def readers(self, unit: int) -> set[int]:
        """The units that read the results of a unit."""
        return {self.owner[root] for kernel in self.units[unit] for root in self.read_by.get(kernel.root, ())}

    def join(self, unit: int, target: int) -> bool:
        """Adds a unit to another one, if that leaves an order; whether it did."""
        if unit > target:
            is_possible = all(source < target for source in self.sources(unit))
        else:
            is_possible = all(reader > target for reader in self.readers(unit))
        if is_possible:
            self.merge(unit, target)
        return is_possible

    def join_maker(self, unit: int) -> bool:
        """Adds a reduction to the unit that makes what it reduces, if all else it reads is there; whether it did."""
        if len(self.units[unit]) != 1:
            return False
        (kernel,) = self.units[unit]
        target = max(self.sources(unit))
        made = [k.root for k in self.units[target]]
        most = max(m.num_elements for m in kernel.members)
        is_reduced = any(x.num_elements >= most for x in kernel.operands if self.owner[x] == target)
        if not is_reduced or not all(x.role == "fusible" or x.fuses_operands for x in made):
            return False
        self.merge(unit, target)
        return True

    def join_reader(self, unit: int, target: int) -> bool:
        """Adds a unit to a later one, which may read it, if nothing between them does; whether it did."""
        is_later = all(reader > target for reader in self.readers(unit) - {target})
        if unit >= target or not is_later:
            return False
        self.merge(unit, target)
        return True

    def merge(self, unit: int, target: int) -> None:
        """Adds the kernels of a unit to another one."""
        self.owner.update((kernel.root, target) for kernel in self.units[unit])
        self.units[target] += self.units[unit]
        self.units[unit] = []


def _looped_over(kernel: Kernel) -> list[Instruction]:
    """The large arrays that a kernel reads element by element."""
    if kernel.root.role not in ("fusible", "bitcast"):
        return []
    most = max([m.num_elements for m in kernel.members])
    return [x for x in kernel.operands if x.num_bytes >= MIN_BYTES and x.num_elements >= most]


def _is_reduction(kernel: Kernel) -> bool:
    """Whether a kernel's result is that of a reduction."""
    sizes = [m.num_elements for m in kernel.members if m.name in REDUCTIONS]
    return kernel.root.num_elements in sizes
