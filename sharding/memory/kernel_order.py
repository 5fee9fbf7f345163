"""Order in which a device runs its kernels.

XLA:CPU runs kernels in the order in which they become ready, which keeps many threads busy and many buffers live
(openxla/xla, `service/hlo_memory_scheduler.cc`, `BFSMemoryScheduler`). Others take the order that needs least memory of
three; XLA:GPU then overlaps collectives (`collective_overlap`). All combine all-reduces: gradients wait for each other,
XLA:TPU's up to 120 MiB of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter

from ..cost import gpu_latencies
from ..cost.collective_combining import combined_collectives, first_ready, postorder
from .compiler_traits import Schedule
from .contiguous_sums import contiguous
from .fusion import Kernel, dependencies_of
from .instruction import Instruction
from .list_schedule import list_order
from .multi_output_fusion import fuse_outputs
from .primitive_traits import updates
from .sibling_fusion import fuse_siblings


@dataclass(slots=True, eq=False)
class Step:
    """Kernels that run at once: one, or all-reduces that were combined."""

    kernels: list[Kernel]
    awaited: list[Instruction] = field(default_factory=list)
    """The operands of collectives that end before it, but for all-reduces, which write over theirs."""
    is_asynchronous: bool = False
    """Whether it is a collective that other kernels overlap."""

    @property
    def operands(self) -> list[Instruction]:
        """What must be kept until here: the operands of its kernels, each once, and those awaited."""
        return list(dict.fromkeys([*(x for k in self.kernels for x in k.operands), *self.awaited]))


class Kernels(list[Kernel]):
    """The kernels of a body in program order, with what several orders begin with, found once.

    Args:
        kernels: in program order.
        results: of the body.
    """

    def __init__(self, kernels: Sequence[Kernel], results: Sequence[Instruction]):
        super().__init__(kernels)
        self.results = results

    @classmethod
    def of(cls, kernels: Sequence[Kernel], results: Sequence[Instruction]) -> Kernels:
        """Themselves, if this is known of them."""
        return kernels if isinstance(kernels, cls) else cls(kernels, results)

    @cached_property
    def siblings(self) -> list[list[Kernel]]:
        """Units that run at once, in a topological order."""
        return fuse_siblings(self)

    @cached_property
    def units(self) -> list[list[Kernel]]:
        """Siblings, all-reduces that are combined, and the elements of a tuple, in a topological order."""
        found: dict[Instruction, list[Kernel]] = {}
        for unit in self.siblings:
            root = unit[0].root
            found.setdefault(root.operands[0] if root.role == "tuple-element" else root, []).extend(unit)
        return _combined([*found.values()], self.results, MOST_REDUCED_BYTES, refills=True)

    @cached_property
    def dependencies(self) -> list[list[int]]:
        """Per unit those whose results it reads."""
        return dependencies_of(self.units)

    @cached_property
    def gpu_units(self) -> list[list[Kernel]]:
        """Siblings and combined collectives as on XLA:GPU, in a topological order."""
        units = fuse_outputs(self, self.results)
        return contiguous(_combined(units, self.results, gpu_latencies.MOST_COMBINED_BYTES))

    @cached_property
    def gpu_dependencies(self) -> list[list[int]]:
        """Per one of these units those whose results it reads."""
        return dependencies_of(self.gpu_units)


Order = Callable[[Sequence[Kernel], Sequence[Instruction]], list[Step]]
"""Kernels in program order, and results -> steps in execution order."""


MOST_REDUCED_BYTES = 120 * 2**20
"""Of the arrays that XLA:TPU reduces by one all-reduce."""


def as_written(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """As in the program, siblings fused and all-reduces combined, each with the last of them."""
    units = Kernels.of(kernels, results).siblings
    place = {kernel.root: k for k, unit in enumerate(units) for kernel in unit}
    units = _combined(units, results, MOST_REDUCED_BYTES, refills=True)
    last = [max(place[kernel.root] for kernel in unit) for unit in units]
    return [Step(units[k]) for k in first_ready(last, dependencies_of(units))]


def result_by_result(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """All that the first result needs, then what else the second needs: each weight's gradient right before its update
    (openxla/xla, `service/hlo_memory_scheduler.cc`, `PostOrderScheduler`)."""
    known = Kernels.of(kernels, results)
    return [Step(known.units[k]) for k in _postorder(known.units, known.dependencies, results)]


def most_freed_first(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """Greedily: see `list_schedule`."""
    known = Kernels.of(kernels, results)
    return [Step(known.units[k]) for k in list_order(known.units, known.dependencies, results)]


def _depth_first(
    units: Sequence[Sequence[Kernel]], sources: Sequence[Sequence[int]], results: Sequence[Instruction]
) -> list[int]:
    """The indices of units, first those that a result needs: of what a unit reads, that with most readers on the way
    first, then that with most bytes (openxla/xla, `hlo/transforms/simplifiers/hlo_memory_scheduler.cc`,
    `DFSMemoryScheduler`)."""
    readers = Counter(j for own in sources for j in own)
    place = {kernel.root: k for k, unit in enumerate(units) for kernel in unit}
    more, sizes, all_bytes = [0] * len(units), [0.0] * len(units), 0.0
    for k, unit in enumerate(units):
        made = sum(kernel.root.num_bytes for kernel in unit if not is_named(kernel))
        all_bytes += made
        more[k] = min(len(units), max(readers[k] - 1, 0) + sum(more[j] for j in sources[k]))
        sizes[k] = min(all_bytes, made + sum(sizes[j] for j in sources[k]))

    def first(indices: Iterable[int]) -> list[int]:
        return sorted(dict.fromkeys(indices), key=lambda k: (-more[k], -sizes[k]))

    ends = [*first(place[x] for x in results), *range(len(units))]
    return postorder(ends, [first(own) for own in sources])


def xla_cpu_order(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """Breadth first, all-reduces combined, as on XLA:CPU."""
    units = _combined([[kernel] for kernel in kernels], results)
    ready = TopologicalSorter(dict(enumerate(dependencies_of(units))))  # first in, first out
    return [Step(units[k]) for k in ready.static_order()]


def xla_gpu_most_freed_first(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """As `most_freed_first` on XLA:GPU."""
    return _gpu_steps(kernels, results, list_order)


def xla_gpu_depth_first(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """See `_depth_first`, on XLA:GPU."""
    return _gpu_steps(kernels, results, _depth_first)


def xla_gpu_as_written(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """As in the program on XLA:GPU, which mostly is one of the other orders."""
    return _constants_late([Step(unit) for unit in Kernels.of(kernels, results).gpu_units])


def xla_gpu_result_by_result(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """As `result_by_result` on XLA:GPU."""
    return _gpu_steps(kernels, results, _postorder)


def _gpu_steps(
    kernels: Sequence[Kernel],
    results: Sequence[Instruction],
    order: Callable[[Sequence[Sequence[Kernel]], Sequence[Sequence[int]], Sequence[Instruction]], list[int]],
) -> list[Step]:
    """The units of XLA:GPU in some order."""
    known = Kernels.of(kernels, results)
    units = known.gpu_units
    return _constants_late([Step(units[k]) for k in order(units, known.gpu_dependencies, results)])


ORDERS: Mapping[Schedule, Sequence[Order]] = {
    "breadth first": [xla_cpu_order],
    "latency hiding": [
        xla_gpu_most_freed_first,
        xla_gpu_as_written,
        xla_gpu_depth_first,
        xla_gpu_result_by_result,
    ],
    "least memory": [most_freed_first, as_written, result_by_result],
}
"""Those of which the compiler takes the one that needs least memory, the first one of equals."""


def is_named(kernel: Kernel) -> bool:
    """Whether a kernel only names an array."""
    return kernel.root.role in ("argument", "tuple-element") or kernel.is_view


def _combined(
    units: Sequence[Sequence[Kernel]],
    results: Sequence[Instruction],
    most_bytes: float = math.inf,
    *,
    refills: bool = False,
) -> list[list[Kernel]]:
    """Units in a topological order, combined collectives as one: see `combined_collectives`."""
    roots = [unit[0].root for unit in units]
    index = {kernel.root: k for k, unit in enumerate(units) for kernel in unit}
    groups = {k: (root.name, root.group) for k, root in enumerate(roots) if root.group is not None}
    sizes = {k: roots[k].num_bytes for k in groups}
    ends = [index[x] for x in results]
    merged = combined_collectives(dependencies_of(units), groups, ends, sizes, most_bytes, refills=refills)
    return [[kernel for k in unit for kernel in units[k]] for unit in merged]


def _postorder(
    units: Sequence[Sequence[Kernel]], dependencies: Sequence[Sequence[int]], results: Sequence[Instruction]
) -> list[int]:
    """The indices of units, those that the first result needs first."""
    place = {kernel.root: k for k, unit in enumerate(units) for kernel in unit}
    return postorder([*(place[x] for x in results), *range(len(units))], dependencies)


def _constants_late(steps: Sequence[Step]) -> list[Step]:
    """The steps; where several scatters add to equal constants, each is filled right before its scatter."""
    filled = {step.kernels[0].root: step for step in steps if step.kernels[0].root.is_constant}
    roots = [(kernel.root, step) for step in steps for kernel in step.kernels if updates(kernel.root.name)]
    pairs = [(root.operands[0], step) for root, step in roots if root.operands[0] in filled]
    alike = Counter((x.shape, x.num_bytes) for x, _ in pairs)
    before = {step: filled[x] for x, step in pairs if alike[x.shape, x.num_bytes] > 1}
    late = {*before.values()}
    return [x for step in steps if step not in late for x in ((before[step], step) if step in before else (step,))]
