"""The arrays that the kernels of a body store, and what their buffers may take over, in whatever order they run."""

from __future__ import annotations

from collections.abc import Sequence

from .compiler_traits import CompilerTraits
from .contiguous_sums import is_contiguous_part
from .fusion import Kernel
from .instruction import Instruction
from .primitive_traits import BARRIER


class StoredArrays:
    """The arrays of a body.

    Args:
        kernels: of the body, each behind those that it reads.
        traits: of the compiler.
    """

    def __init__(self, kernels: Sequence[Kernel], traits: CompilerTraits):
        self.traits = traits
        self.kernel_of = {kernel.root: kernel for kernel in kernels}
        self.readers: dict[Instruction, list[Kernel]] = {}
        self.origin: dict[Instruction, Instruction] = {}
        """Each stored array -> the one that reshapes and barriers pass on as it."""
        self._pairs: dict[Instruction, dict[int, int]] = {}
        self._overwritable: dict[Instruction, list[Instruction]] = {}
        for kernel in kernels:
            source = self.passed_on(kernel)
            self.origin[kernel.root] = kernel.root if source is None else self.origin[source]
            for operand in kernel.operands:
                self.readers.setdefault(operand, []).append(kernel)

    def passed_on(self, kernel: Kernel) -> Instruction | None:
        """The array that a kernel only reshapes, or a barrier holds back; None of others."""
        root = kernel.root
        if root.role == "tuple-element" and root.operands[0].name == BARRIER:
            at = self.operand_in_place(root.operands[0], root.element)
            return None if at is None else root.operands[0].operands[at]
        return kernel.operands[0] if kernel.is_view else None

    def overwritable(self, kernel: Kernel) -> list[Instruction]:
        """The operands of an elementwise kernel that are stored as its result is."""
        if kernel.root not in self._overwritable:
            self._overwritable[kernel.root] = self.stored_alike(kernel) if kernel.root.elementwise else []
        return self._overwritable[kernel.root]

    def stored_alike(self, kernel: Kernel) -> list[Instruction]:
        """See `overwritable`."""
        root = kernel.root
        alike = [x for x in kernel.operands if x.stored_bytes == root.stored_bytes and not is_contiguous_part(x)]
        if self.traits.chooses_layouts and (found := read_alike(kernel)):
            return [x for x in alike if x in found]
        scattered = read_otherwise(kernel)
        return [x for x in alike if x.shape == root.shape and x not in scattered]

    def operand_in_place(self, source: Instruction, element: int) -> int | None:
        """The index of the operand whose buffer a result of an instruction with several takes, if any."""
        if source not in self._pairs:
            self._pairs[source] = {result: at for at, result in reversed(source.in_place)}
        return self._pairs[source].get(element)


def read_otherwise(kernel: Kernel) -> set[Instruction]:
    """What a kernel reads on some path to its result that is not elementwise."""
    found: set[Instruction] = set()
    for m in reversed(kernel.members):
        if not m.elementwise or m in found:
            found.update(m.operands)
    return found


def read_alike(kernel: Kernel) -> set[Instruction]:
    """The arrays of the size of a kernel's result, if the kernel transposes all of them alike; none otherwise.

    A product's result in another order of dims counts as stored in that order.
    """
    inside = {*kernel.members}
    orders: dict[Instruction, set[tuple[int, ...] | None]] = {kernel.root: {tuple(range(len(kernel.root.shape)))}}
    found: dict[Instruction, tuple[int, ...]] = {}
    """Operand -> its shape as it is stored."""
    common: set[tuple[int, ...] | None] = set()
    for m in reversed(kernel.members):
        for order in orders[m]:
            moved = m.eqn.params.get("permutation") if m.name == "transpose" and m.eqn is not None else None
            is_stored_so = moved is not None and m.role == "bitcast"
            if moved is not None and not is_stored_so and order is not None and len(moved) == len(order):
                order = tuple(moved[d] for d in order)
            elif not m.elementwise and not is_stored_so:
                order = None
            for x in m.operands:
                if x in inside:
                    orders.setdefault(x, set()).add(order)
                elif x.num_elements == kernel.root.num_elements:
                    common.add(order)
                    found[x] = m.shape if is_stored_so else x.shape
    order = common.pop() if len(common) == 1 else None
    if order is None:
        return set()
    shapes = {x: shape for x, shape in found.items() if len(shape) == len(order)}
    return {x for x, shape in shapes.items() if tuple(shape[d] for d in order) == kernel.root.shape}
