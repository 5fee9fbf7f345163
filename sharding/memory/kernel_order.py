"""Order in which a device runs its kernels.

XLA:CPU runs kernels in the order in which they become ready, which keeps many threads busy and many buffers live
(openxla/xla, `service/hlo_memory_scheduler.cc`, `BFSMemoryScheduler`). Others take the order that needs least memory of
three; where there are collectives, XLA:GPU then moves kernels to hide their latencies: models with unrolled layers peak
at up to twice the memory that the program's order takes. All combine all-reduces: gradients wait for each other,
XLA:TPU's up to 120 MiB of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter

from ..cost import gpu_latencies
from ..cost.collective_combining import combined_collectives, first_ready, postorder
from ..cost.latency_hiding import Part, Work, latency_hiding_order
from .compiler_traits import Schedule
from .contiguous_sums import contiguous
from .fusion import Kernel
from .instruction import Instruction
from .list_schedule import list_order
from .primitive_traits import BARRIER, updates
from .sibling_fusion import fuse_siblings


@dataclass(slots=True, eq=False)
class Step:
    """Kernels that run at once: one, or all-reduces that were combined."""

    kernels: list[Kernel]
    awaited: list[Instruction] = field(default_factory=list)
    """The operands of collectives that end before it."""

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
        return fuse_siblings(self, elementwise=True)

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
        return _dependencies(self.units)

    @cached_property
    def gpu_units(self) -> list[list[Kernel]]:
        """Siblings and combined collectives as on XLA:GPU, in a topological order."""
        units = fuse_siblings(self, reorders=True)
        return contiguous(_combined(units, self.results, gpu_latencies.MOST_COMBINED_BYTES))

    @cached_property
    def gpu_dependencies(self) -> list[list[int]]:
        """Per one of these units those whose results it reads."""
        return _dependencies(self.gpu_units)

    @cached_property
    def overlapped(self) -> list[Step] | None:
        """The steps with collectives overlapped with other kernels, as on XLA:GPU; None if there are none."""
        works, made = _works(self.gpu_units)
        if not any(work.is_collective or work.communicates for work in works):
            return None
        order: list[tuple[int, Part]] = [
            (k, part) for n, part in latency_hiding_order(works) if (k := made[n]) is not None
        ]
        return _constants_late(_overlapped_steps(self.gpu_units, order))


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
    return [Step(units[k]) for k in first_ready(last, _dependencies(units))]


def result_by_result(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """All that the first result needs, then what else the second needs: each weight's gradient right before its update
    (openxla/xla, `service/hlo_memory_scheduler.cc`, `PostOrderScheduler`)."""
    known = Kernels.of(kernels, results)
    return [Step(known.units[k]) for k in _postorder(known.units, known.dependencies, results)]


def most_freed_first(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """Greedily: see `list_schedule`."""
    known = Kernels.of(kernels, results)
    return [Step(known.units[k]) for k in list_order(known.units, known.dependencies, results)]


def xla_cpu_order(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """Breadth first, all-reduces combined, as on XLA:CPU."""
    units = _combined([[kernel] for kernel in kernels], results)
    ready = TopologicalSorter(dict(enumerate(_dependencies(units))))  # first in, first out
    return [Step(units[k]) for k in ready.static_order()]


def xla_gpu_order(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """Siblings fused, and collectives combined and overlapped with other kernels, as on XLA:GPU."""
    known = Kernels.of(kernels, results)
    return known.overlapped or _constants_late([Step(unit) for unit in known.gpu_units])


def xla_gpu_result_by_result(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """As `result_by_result` on XLA:GPU, which keeps this order where there are no collectives."""
    known = Kernels.of(kernels, results)
    order = [] if known.overlapped else _postorder(known.gpu_units, known.gpu_dependencies, results)
    return known.overlapped or _constants_late([Step(known.gpu_units[k]) for k in order])


def xla_gpu_most_freed_first(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """As `most_freed_first` on XLA:GPU, which keeps this order where there are no collectives."""
    known = Kernels.of(kernels, results)
    order = [] if known.overlapped else list_order(known.gpu_units, known.gpu_dependencies, results)
    return known.overlapped or _constants_late([Step(known.gpu_units[k]) for k in order])


ORDERS: Mapping[Schedule, Sequence[Order]] = {
    "breadth first": [xla_cpu_order],
    "latency hiding": [xla_gpu_most_freed_first, xla_gpu_order, xla_gpu_result_by_result],
    "least memory": [most_freed_first, as_written, result_by_result],
}
"""Those of which the compiler takes the one that needs least memory, the first one of equals."""


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
    merged = combined_collectives(_dependencies(units), groups, ends, sizes, most_bytes, refills=refills)
    return [[kernel for k in unit for kernel in units[k]] for unit in merged]


def _dependencies(units: Sequence[Sequence[Kernel]]) -> list[list[int]]:
    """Per unit those whose results it reads."""
    owner = {kernel.root: k for k, unit in enumerate(units) for kernel in unit}
    found = [dict.fromkeys(owner[x] for kernel in unit for x in kernel.operands) for unit in units]
    return [[j for j in sources if j != k] for k, sources in enumerate(found)]


def _postorder(
    units: Sequence[Sequence[Kernel]], dependencies: Sequence[Sequence[int]], results: Sequence[Instruction]
) -> list[int]:
    """The indices of units, those that the first result needs first."""
    place = {kernel.root: k for k, unit in enumerate(units) for kernel in unit}
    return postorder([*(place[x] for x in results), *range(len(units))], dependencies)


def _works(units: Sequence[Sequence[Kernel]]) -> tuple[list[Work], list[int | None]]:
    """The work of units as XLA:GPU's scheduler sees it, and the unit that each stands for.

    A split product is summed by another kernel, unless those that slice it do; its result counts from the product on.
    """
    owner = {kernel.root: k for k, unit in enumerate(units) for kernel in unit}
    readers: list[list[str]] = [[] for _ in units]
    for unit in units:
        for kernel in unit:
            for x in kernel.operands:
                readers[owner[x]].append(kernel.root.name)
    works: list[Work] = []
    made: list[int | None] = []
    last: list[int] = []
    """Unit -> the work that ends it."""
    for k, (unit, after) in enumerate(zip(units, _dependencies(units), strict=True)):
        views = frozenset(last[j] for j in _views(unit, units, owner))
        works.append(_work(unit, tuple(last[j] for j in after), views))
        made.append(k)
        product = unit[0].root.product
        if product is not None and product.is_split and any(name != "slice" for name in readers[k]):
            works.append(Work(microseconds=product.sum_us, after=(len(works) - 1,)))
            made.append(None)
        last.append(len(works) - 1)
    return works, made


def _views(
    unit: Sequence[Kernel], units: Sequence[Sequence[Kernel]], owner: Mapping[Instruction, int]
) -> frozenset[int]:
    """The units whose results a unit reads through an op that takes no time: one of several, or reshaped for a matrix
    product or for a collective, whose kernels don't reshape."""
    found, own = set(), {kernel.root for kernel in unit}
    for kernel in unit:
        root, product = kernel.root, kernel.root.product
        for x in kernel.operands:
            if x in own:
                continue
            is_one_of_several = len(units[owner[x]]) > 1
            if product is not None:
                is_view = product.is_reshaped and not (x.product is not None and x.shape == root.shape)
            else:
                is_view = root.name in gpu_latencies.COLLECTIVES and x.product is not None and x.product.is_reshaped
            if is_one_of_several or is_view:
                found.add(owner[x])
    return frozenset(found)


def _work(unit: Sequence[Kernel], after: tuple[int, ...], views: frozenset[int]) -> Work:
    """A unit as XLA:GPU's scheduler sees it."""
    root = unit[0].root
    if root.role == "unfusible" and root.name in gpu_latencies.COLLECTIVES:
        num_bytes = sum(x.num_bytes for kernel in unit for x in kernel.operands)
        latency = gpu_latencies.collective_us(root.name, num_bytes, root.num_devices)
        return Work(microseconds=latency, after=after, views=views, is_collective=True)
    return Work(
        microseconds=sum(map(_kernel_us, unit)),
        after=after,
        views=views,
        communicates=any(not body.names().isdisjoint(gpu_latencies.COLLECTIVES) for body in root.bodies),
    )


def _kernel_us(kernel: Kernel) -> float:
    """The time of a kernel that is not a collective."""
    root = kernel.root
    if root.bodies:
        return gpu_latencies.LOOP_US
    if _is_view(kernel) or root.name == BARRIER or root.num_bytes == 0:
        return 0.0
    if root.name == "conv_general_dilated":
        return gpu_latencies.CONVOLUTION_US
    num_bytes = root.num_bytes + sum(x.num_bytes for x in kernel.operands)
    if root.product is not None:
        return gpu_latencies.product_us(root.product, num_bytes)
    return num_bytes / gpu_latencies.BYTES_PER_US


def _is_view(kernel: Kernel) -> bool:
    """Whether a kernel only names an array."""
    return kernel.root.role in ("argument", "tuple-element") or kernel.is_view


def _overlapped_steps(units: Sequence[list[Kernel]], order: Sequence[tuple[int, Part]]) -> list[Step]:
    """The steps of scheduled units; the operands of a collective that overlaps others live until it ends.

    One that overlaps none is synchronous (openxla/xla, `hlo/transforms/convert_async_collectives_to_sync.cc`).
    """
    steps: list[Step] = []
    awaited: list[Instruction] = []
    in_flight: set[int] = set()
    """Collectives that overlap nothing so far."""
    for k, part in order:
        if part == "end":
            awaited += [] if k in in_flight else [x for kernel in units[k] for x in kernel.operands]
        else:
            steps.append(Step(units[k], awaited))
            awaited = []
            if part == "start":
                in_flight.add(k)
            elif not all(map(_is_view, units[k])):
                in_flight.clear()
    if awaited:
        steps[-1].awaited += awaited
    return steps


def _constants_late(steps: Sequence[Step]) -> list[Step]:
    """The steps; where several scatters add to equal constants, each is filled right before its scatter."""
    filled = {step.kernels[0].root: step for step in steps if step.kernels[0].root.is_constant}
    roots = [(kernel.root, step) for step in steps for kernel in step.kernels if updates(kernel.root.name)]
    pairs = [(root.operands[0], step) for root, step in roots if root.operands[0] in filled]
    alike = Counter((x.shape, x.num_bytes) for x, _ in pairs)
    before = {step: filled[x] for x, step in pairs if alike[x.shape, x.num_bytes] > 1}
    late = {*before.values()}
    return [x for step in steps if step not in late for x in ((before[step], step) if step in before else (step,))]
