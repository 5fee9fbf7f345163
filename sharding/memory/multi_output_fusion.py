"""Kernels that XLA:GPU runs as one (openxla/xla, `backends/gpu/transforms/multi_output_fusion.cc`).

From the last array to the first: those that read it and loop over as many elements, however small it is; then the
kernel that makes it with one that reads it. What only kernels of one unit read is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from .. import compat
from ..cost.collective_combining import first_ready
from ..cost.gpu_arithmetic import EXPANSIONS, LAUNCH_US
from .dim_orders import is_transposing, transposed
from .fusion import Kernel, dependencies_of
from .instruction import Instruction
from .kernel_cost import MOST_IN_COLUMN, MOST_IN_ROW, WARP, KernelCost, innermost, stored_dims
from .primitive_traits import REDUCTIONS, updates
from .priority_fusion import MOST_OPERANDS

MOST_REDUCTIONS = 8
"""Of one kernel."""
MOST_REDUCED = {True: MOST_IN_ROW, False: MOST_IN_COLUMN}
"""Whether the last dim is reduced -> elements that are summed in one step."""


def fuse_outputs(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[list[Kernel]]:
    """Kernels that run as one, in a topological order.

    Args:
        kernels: in program order.
        results: of the body.
    """
    units = _Units(kernels, results)
    units.fuse()
    return units.ordered()


@dataclass(frozen=True, slots=True)
class Loop:
    """What the threads of a kernel loop over."""

    num_elements: int
    reduced: tuple[tuple[int, bool], ...] = ()
    """If its root is a reduction: the sizes of dims, joined where neighbours are both reduced or both kept, and whether
    they are."""
    transposed: tuple[int, ...] = ()
    """If its root is a transpose that moves the last dim: see `dim_orders`."""

    @property
    def is_tiled(self) -> bool:
        """Whether blocks of threads share memory."""
        return bool(self.reduced or self.transposed)

    def fits(self, other: Loop) -> bool:
        """Whether one kernel can have both."""
        is_same = (self.reduced, self.transposed) == (other.reduced, other.transposed)
        return self.num_elements == other.num_elements and (is_same or not (self.is_tiled and other.is_tiled))


def loop_of(kernel: Kernel) -> Loop | None:
    """The loop of a kernel; None if it has one result only, as scatters and updates, or is another compiler's."""
    root = kernel.root
    if root.role != "fusible" or root.in_place or updates(root.name) or is_custom(kernel):
        return None
    for one in kernel.members:
        if one.name in REDUCTIONS and one.num_elements == root.num_elements < one.operands[0].num_elements:
            dims = _joined_dims(one)
            if _is_tiled(dims):
                return Loop(one.operands[0].num_elements, reduced=dims)
    return Loop(root.num_elements, transposed=transposed(root))


def is_several(kernel: Kernel) -> bool:
    """Whether a kernel is of several ops, also by what XLA makes of its only one: with a constant, with indices of
    another shape, in two steps, or of joined dims."""
    one = kernel.root
    if len(kernel.members) > 1 or one.name == "gather":
        return True
    if one.name in REDUCTIONS and one.eqn is not None:
        dims = _joined_dims(one)
        is_split = any(size > MOST_REDUCED[dims[-1][1]] for size, is_reduced in dims if is_reduced)
        return is_split or one.operands[0].shape != tuple(size for size, _ in dims)
    if not one.elementwise or one.eqn is None:
        return False
    is_spread = any(compat.is_literal(x) for x in one.eqn.invars) or any(x.shape != one.shape for x in one.operands)
    return is_spread or len(EXPANSIONS.get(one.name, ())) > 1


def is_custom(kernel: Kernel) -> bool:
    """Whether XLA:GPU has Triton compile a kernel: one of products, or of rows and reductions of them."""
    size = kernel.root.num_elements
    return any(
        one.product is not None or (one.name in REDUCTIONS and one.num_elements < size == one.operands[0].num_elements)
        for one in kernel.members
    )


def _joined_dims(one: Instruction) -> tuple[tuple[int, bool], ...]:
    dims, found = stored_dims(one), []
    while dims:
        found.append(innermost(dims))
    return tuple(reversed(found))


def _is_tiled(dims: Sequence[tuple[int, bool]]) -> bool:
    """Whether threads run a reduction together, rather than each all of a result."""
    reduced = [size for size, is_reduced in dims if is_reduced]
    return bool(reduced) and (reduced[-1] >= WARP or (dims[-1][1] and WARP % reduced[-1] == 0))


class _Units:
    """Kernels, those that run as one under the index of one of them."""

    def __init__(self, kernels: Sequence[Kernel], results: Sequence[Instruction]):
        self.kernels, self.results = kernels, {*results}
        self.index = {kernel.root: k for k, kernel in enumerate(kernels)}
        self.units = [[k] for k in range(len(kernels))]
        self.unit_of = [*range(len(kernels))]
        """Per kernel."""
        self.loops = [loop_of(kernel) for kernel in kernels]
        """Per unit: that of a reduction or transpose, if it has one."""
        self.are_tiled = [loop is not None and loop.is_tiled for loop in self.loops]
        """Per kernel."""
        self.are_several = [is_several(kernel) for kernel in kernels]
        self.operands = [{*kernel.operands} for kernel in kernels]
        self.num_reductions = [int(loop is not None and bool(loop.reduced)) for loop in self.loops]
        self.readers: dict[Instruction, list[int]] = {}
        """Array -> the kernels that read it."""
        self.above = [0] * len(kernels)
        """Per unit a bit for each kernel that it depends on."""
        for k, kernel in enumerate(kernels):
            for x in kernel.operands:
                self.readers.setdefault(x, []).append(k)
                self.above[k] |= self.above[self.index[x]] | 1 << self.index[x]
        self.costs: dict[int, KernelCost] = {}

    def fuse(self) -> None:
        """Fuses all that can be."""
        for k in range(len(self.kernels) - 1, -1, -1):
            kernel = self.kernels[k]
            if not is_custom(kernel) and not kernel.root.is_constant:
                self.fuse_siblings(kernel.root)
                self.fuse_maker(k)

    def reading(self, x: Instruction) -> list[int]:
        """The units that read an array and may have several results, those that have first, then those of several
        ops."""
        found = dict.fromkeys(self.unit_of[k] for k in self.readers.get(x, ()))
        return sorted((u for u in found if self.is_candidate(u)), key=self.rank, reverse=True)

    def is_candidate(self, u: int) -> bool:
        """Whether a unit may have several results: not an op alone that moves data."""
        loop = self.loops[u]
        return loop is not None and (loop.is_tiled or self.rank(u) > 0 or self.kernels[u].root.elementwise)

    def rank(self, u: int) -> int:
        """2 for several kernels, 1 for several ops, else 0."""
        return 2 if len(self.units[u]) > 1 else int(self.are_several[u])

    def fuse_siblings(self, x: Instruction) -> None:
        """Fuses what reads an array."""
        if x.num_elements <= 1 or len(self.readers.get(x, ())) < 2:
            return
        siblings = self.reading(x)
        while siblings and self.rank(siblings[0]):
            u, *others = siblings
            siblings = []
            for v in others:
                if self.is_independent(u, v) and self.fits(u, v):
                    self.join(u, v)
                else:
                    siblings.append(v)

    def is_independent(self, u: int, v: int) -> bool:
        """Whether neither of two units needs the other."""
        return not (self.above[u] >> v & 1 or self.above[v] >> u & 1)

    def fits(self, u: int, v: int) -> bool:
        """Whether one kernel can compute two units."""
        one, other = self.loops[u], self.loops[v]
        if one is None or other is None or not one.fits(other):
            return False
        if self.num_reductions[u] + self.num_reductions[v] > MOST_REDUCTIONS:
            return False
        num_results = len(self.units[u]) + len(self.units[v])
        return num_results + len(self.operands[u] | self.operands[v]) <= MOST_OPERANDS

    def join(self, u: int, v: int) -> None:
        """Adds the kernels of a unit to another one."""
        one, other = self.loops[u], self.loops[v]
        self.loops[u] = other if other is not None and other.is_tiled else one
        for k in self.units[v]:
            self.unit_of[k] = u
        self.units[u] += self.units[v]
        self.units[v] = []
        self.operands[u] |= self.operands[v]
        self.num_reductions[u] += self.num_reductions[v]
        mask = sum(1 << k for k in self.units[u])
        above = (self.above[u] | self.above[v]) & ~mask
        more = above | mask
        for k, known in enumerate(self.above):
            if known & mask:
                self.above[k] = known | more
        self.above[u] = above

    def fuse_maker(self, k: int) -> None:
        """Fuses the kernel that makes an array with one that reads it, if it may have several results."""
        loop, root, u = self.loops[k], self.kernels[k].root, self.unit_of[k]
        if loop is None or loop.reduced or self.rank(u) == 2 or any(map(is_transposing, self.kernels[k].members)):
            return
        readers = {self.unit_of[reader] for reader in self.readers.get(root, ())}
        if len(readers) == 1 and root not in self.results and self.rank(next(iter(readers))) < 2:
            return  # as the kernels were fused before
        for v in self.reading(root):
            if self.fits(k, v) and not self.needs_another(v, k) and self.is_faster(k, v):
                self.join(v, k)
                return

    def needs_another(self, v: int, k: int) -> bool:
        """Whether a unit that reads a kernel's result reads something else that depends on it."""
        others = {self.unit_of[self.index[x]] for x in self.operands[v]} - {k, v}
        return any(self.above[w] >> k & 1 for w in others)

    def is_faster(self, k: int, v: int) -> bool:
        """Whether a kernel and a unit that reads its result take less time as one.

        What is elementwise computes it once, each reduction or transpose once more.
        """
        producer, root = self.cost(k), self.kernels[k].root
        readers = [reader for reader in self.units[v] if root in self.kernels[reader].operands]
        tiled = [reader for reader in readers if self.are_tiled[reader]]
        plain = [reader for reader in readers if not self.are_tiled[reader]]
        costs = [self.cost(reader) for reader in (*plain[:1], *tiled)]
        together = sum(one.us_with(producer, stores=one is costs[0]) for one in costs)
        return together <= LAUNCH_US + producer.us + sum(one.us for one in costs)

    def cost(self, k: int) -> KernelCost:
        """That of a kernel alone."""
        if k not in self.costs:
            *members, root = self.kernels[k].members
            self.costs[k] = reduce(KernelCost.with_producer, map(KernelCost.of, reversed(members)), KernelCost.of(root))
        return self.costs[k]

    def ordered(self) -> list[list[Kernel]]:
        """The units as soon as all they read is there, otherwise by the last of their kernels."""
        kept = [sorted(unit) for unit in self.units if unit]
        found = [self.stored(unit) for unit in kept]
        return [found[at] for at in first_ready([unit[-1] for unit in kept], dependencies_of(found))]

    def stored(self, unit: Sequence[int]) -> list[Kernel]:
        """The kernels of a unit; what only others of it read is computed by these."""
        found: list[Kernel] = []
        inside: dict[Instruction, Kernel] = {}
        for k in unit:
            kernel = self.kernels[k]
            if not inside.keys().isdisjoint(kernel.operands):
                kernel = _computing(kernel, inside)
            readers = self.readers.get(kernel.root, ())
            if readers and kernel.root not in self.results and {*readers}.issubset(unit):
                inside[kernel.root] = kernel
            else:
                found.append(kernel)
        return found


def _computing(kernel: Kernel, inside: Mapping[Instruction, Kernel]) -> Kernel:
    """A kernel that computes some of its operands itself, as some kernels do."""
    members = [m for x in kernel.operands if x in inside for m in inside[x].members]
    operands = [y for x in kernel.operands for y in (inside[x].operands if x in inside else [x])]
    return Kernel(kernel.root, [*dict.fromkeys([*members, *kernel.members])], [*dict.fromkeys(operands)])
