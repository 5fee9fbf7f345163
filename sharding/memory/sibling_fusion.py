"""Multi-output fusion: kernels that read the same array run as one (openxla/xla, `multi_output_fusion.cc`).

These are a reduction and the kernel that makes its array, or another reader of it. On TPUs also elementwise kernels,
such as those of a weight and of its moments, which one kernel updates.
"""

from __future__ import annotations

from collections.abc import Sequence

from .fusion import Kernel
from .instruction import Instruction
from .primitive_traits import REDUCTIONS

MIN_BYTES = 2**16
"""Kernels that share smaller arrays are fused, too, but don't matter, unless one of them picks from a larger array."""
MANY_TIMES = 16
"""How much larger than a result an array is that a kernel picks it from."""


MOST_MOVED_OVER = 64
"""Kernels that a reduction moves down over together with what reads it."""


def fuse_siblings(
    kernels: Sequence[Kernel], *, reorders: bool = False, elementwise: bool = False
) -> list[list[Kernel]]:
    """The kernels in a topological order, reductions with a kernel that reads the same array.

    A reduction moves up to the array's last reader before it, or down to the next one, where its operands and readers
    let it.

    Args:
        kernels: in program order.
        reorders: whether what reads a reduction moves down with it, kernels that pick from a large array are fused like
            reductions, and reductions that find no other reader run in the kernel that makes their array. Otherwise all
            others stay in program order.
        elementwise: whether reductions run in the kernel that makes their array, and kernels of elementwise ops move
            down to the next one that reads the same array, and makes one of their shape, also if it reads theirs.
    """
    found = _Units(kernels)
    readers: dict[Instruction, list[int]] = {}
    for k, kernel in enumerate(kernels):
        for x in _looped_over(kernel, picks=reorders):
            readers.setdefault(x, []).append(k)
    for siblings in readers.values():
        for before, k, after in zip([None, *siblings], siblings, [*siblings[1:], None], strict=False):
            is_reduction = _is_reduction(kernels[k])
            if elementwise and is_reduction and found.join_maker(k):
                continue
            if len(found.units[k]) != 1 or not (is_reduction or (reorders and _picks(kernels[k]))):
                continue
            for sibling in (before, after):
                target = k if sibling is None else found.owner[kernels[sibling].root]
                if target != k and found.join(k, target, reorders=reorders):
                    break
            else:
                if reorders and is_reduction:
                    found.join_maker(k)
    for siblings in readers.values() if elementwise else ():
        alike: dict[tuple[int, ...], Instruction] = {}
        """Shape -> the root of the next kernel that makes one."""
        for root in [kernels[k].root for k in reversed(siblings) if kernels[k].root.elementwise]:
            after = alike.get(root.shape)
            if after is None or not found.join_reader(found.owner[root], found.owner[after]):
                alike[root.shape] = root
    return [found.units[u] for u in found.order if found.units[u]]


class _Units:
    """Kernels that run at once, in a topological order."""

    def __init__(self, kernels: Sequence[Kernel]):
        self.units = [[kernel] for kernel in kernels]
        self.owner = {kernel.root: k for k, kernel in enumerate(kernels)}
        """The unit of each root."""
        self.order = list(range(len(kernels)))
        self.place = list(range(len(kernels)))
        """Of each unit in the order."""
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

    def join(self, unit: int, target: int, *, reorders: bool) -> bool:
        """Adds a unit to another one, if that leaves an order; whether it did."""
        first, last = self.place[unit], self.place[target]
        if first > last:
            is_possible = all(self.place[source] < last for source in self.sources(unit))
        else:
            is_possible = all(self.place[reader] > last for reader in self.readers(unit))
            if not is_possible and reorders:
                is_possible = self.moved_behind(unit, target)
        if is_possible:
            self.merge(unit, target)
        return is_possible

    def join_maker(self, unit: int) -> bool:
        """Adds a reduction to the unit that makes what it reduces, if all else it reads is there; whether it did."""
        if len(self.units[unit]) != 1:
            return False
        (kernel,) = self.units[unit]
        target = max(self.sources(unit), key=self.place.__getitem__)
        made = [k.root for k in self.units[target]]
        most = max(m.num_elements for m in kernel.members)
        is_reduced = any(x.num_elements >= most for x in kernel.operands if self.owner[x] == target)
        if not is_reduced or not all(x.role == "fusible" or x.fuses_operands for x in made):
            return False
        self.merge(unit, target)
        return True

    def join_reader(self, unit: int, target: int) -> bool:
        """Adds a unit to a later one, which may read it, if nothing between them does; whether it did."""
        last = self.place[target]
        is_later = all(self.place[reader] > last for reader in self.readers(unit) - {target})
        if self.place[unit] >= last or not is_later:
            return False
        self.merge(unit, target)
        return True

    def merge(self, unit: int, target: int) -> None:
        """Adds the kernels of a unit to another one."""
        self.owner.update((kernel.root, target) for kernel in self.units[unit])
        self.units[target] += self.units[unit]
        self.units[unit] = []

    def moved_behind(self, unit: int, target: int) -> bool:
        """Moves what reads a unit behind a later one, unless that reads it, too; whether it did."""
        first, last = self.place[unit], self.place[target]
        if last - first > MOST_MOVED_OVER:
            return False
        moved = {unit}
        for u in self.order[first + 1 : last]:
            if not moved.isdisjoint(self.sources(u)):
                moved.add(u)
        if not moved.isdisjoint(self.sources(target)):
            return False
        window = self.order[first:last]
        rest = [u for u in window if u not in moved]
        self.order[first : last + 1] = [*rest, target, *(u for u in window if u in moved)]
        for at in range(first, last + 1):
            self.place[self.order[at]] = at
        return True


def _looped_over(kernel: Kernel, *, picks: bool) -> list[Instruction]:
    """The large arrays that a kernel reads element by element, or those of its result's size if it picks that."""
    if kernel.root.role not in ("fusible", "bitcast"):
        return []
    most, size = max([m.num_elements for m in kernel.members]), kernel.root.num_elements
    large = [x for x in kernel.operands if x.num_bytes >= MIN_BYTES and x.num_elements >= most]
    if not picks or not REDUCTIONS.isdisjoint([m.name for m in kernel.members]):
        return large
    alike = [x for x in kernel.operands if x.num_elements == size > 1]
    return alike if _picks(kernel) else [*dict.fromkeys([*large, *alike])]


def _picks(kernel: Kernel) -> bool:
    """Whether a kernel reads some elements of a much larger array, and reduces none."""
    least = max(MIN_BYTES, MANY_TIMES * kernel.root.num_bytes)
    if kernel.root.role != "fusible" or not [x for x in kernel.operands if x.num_bytes >= least]:
        return False
    return REDUCTIONS.isdisjoint([m.name for m in kernel.members])


def _is_reduction(kernel: Kernel) -> bool:
    """Whether a kernel's result is that of a reduction."""
    sizes = [m.num_elements for m in kernel.members if m.name in REDUCTIONS]
    return kernel.root.num_elements in sizes
