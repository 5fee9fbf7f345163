"""Kernels that XLA:GPU moves so that they hide the latencies of collectives.

Models with unrolled layers peak at up to twice the memory that the order with least memory takes. The scheduler itself
is `cost/latency_hiding`; here is the program as it sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..cost import gpu_latencies
from ..cost.latency_hiding import Part, Work, latency_hiding_order
from .fusion import Kernel, dependencies_of
from .instruction import Instruction
from .kernel_cost import PARTS
from .kernel_order import Step, is_named
from .primitive_traits import BARRIER


def communicates(steps: Sequence[Step]) -> bool:
    """Whether some steps are collectives, or loops or branches with collectives."""
    return any(_is_collective(kernel) or _has_collectives(kernel) for step in steps for kernel in step.kernels)


def overlapped(steps: Sequence[Step], results: Sequence[Instruction]) -> list[Step]:
    """The steps with collectives overlapped with other kernels."""
    units = [step.kernels for step in steps]
    works, made = _works(units, results)
    order: list[tuple[int, Part]] = [(k, part) for n, part in latency_hiding_order(works) if (k := made[n]) is not None]
    return _steps(units, order)


def _works(units: Sequence[Sequence[Kernel]], results: Sequence[Instruction]) -> tuple[list[Work], list[int | None]]:
    """The work of units as XLA:GPU's scheduler sees it, and the unit that each stands for.

    A split product is summed by another kernel, unless those that slice it do; its result counts from the product on.
    What a barrier holds back, and the program's results, are tuples.
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

    def add(work: Work, unit: int | None = None) -> int:
        works.append(work)
        made.append(unit)
        return len(works) - 1

    for k, (unit, after) in enumerate(zip(units, dependencies_of(units), strict=True)):
        views = frozenset(last[j] for j in _views(unit, units, owner))
        sources, root = tuple(last[j] for j in after), unit[0].root
        if root.name == BARRIER and root.role != "tuple-element":
            sources = (add(Work(microseconds=0.0, after=sources, views=views)),)
            views = frozenset()
        place = add(_work(unit, sources, views), k)
        product = root.product
        if product is not None and product.is_split and any(name != "slice" for name in readers[k]):
            place = add(Work(microseconds=product.sum_us, after=(place,)))
        last.append(place)
    ends = dict.fromkeys(owner[x] for x in results)
    add(
        Work(
            microseconds=0.0,
            after=tuple(last[k] for k in ends),
            views=frozenset(last[k] for k in ends if len(units[k]) > 1),
        )
    )
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
    if _is_collective(unit[0]):
        num_bytes = sum(x.num_bytes for kernel in unit for x in kernel.operands)
        latency = gpu_latencies.collective_us(root.name, num_bytes, root.num_devices)
        return Work(microseconds=latency, after=after, views=views, is_collective=True)
    return Work(
        microseconds=sum(map(_kernel_us, unit)),
        after=after,
        views=frozenset(after) if root.bodies else views,
        communicates=_has_collectives(unit[0]),
        is_view=all(is_named(kernel) or kernel.root.num_bytes == 0 for kernel in unit) and root.name != BARRIER,
        is_filled_late=root.is_constant and sum(kernel.root.num_bytes for kernel in unit) >= gpu_latencies.LATE_BYTES,
    )


def _is_collective(kernel: Kernel) -> bool:
    return kernel.root.role == "unfusible" and kernel.root.name in gpu_latencies.COLLECTIVES


def _has_collectives(kernel: Kernel) -> bool:
    """Whether a loop or branch has some."""
    return any(not body.names().isdisjoint(gpu_latencies.COLLECTIVES) for body in kernel.root.bodies)


def _kernel_us(kernel: Kernel) -> float:
    """The time of a kernel that is not a collective."""
    root = kernel.root
    if root.bodies:
        return gpu_latencies.LOOP_US
    if is_named(kernel) or root.name == BARRIER or root.num_bytes == 0:
        return 0.0
    if root.name == "conv_general_dilated":
        return gpu_latencies.CONVOLUTION_US
    if root.product is not None:
        return gpu_latencies.product_us(root.product, root.num_bytes + sum(x.num_bytes for x in kernel.operands))
    return _moved_bytes(kernel) / gpu_latencies.BYTES_PER_US


def _moved_bytes(kernel: Kernel) -> float:
    """The bytes that a kernel reads and writes: where it reads or updates parts of an array, those of the parts."""
    root, found = kernel.root, 0.0
    in_part = root.name == "dynamic_update_slice" and len(root.operands) > 1
    written = root.operands[1].num_bytes if in_part else root.num_bytes
    for x in kernel.operands:
        readers = [m for m in kernel.members if x in m.operands]
        if in_part and readers == [root] and x is root.operands[0]:
            found += written
        elif readers and all(m.name in PARTS and m.operands[0] is x for m in readers):
            found += sum(m.num_elements * x.itemsize for m in readers)
        else:
            found += x.num_bytes
    return found + written


def _steps(units: Sequence[list[Kernel]], order: Sequence[tuple[int, Part]]) -> list[Step]:
    """The steps of scheduled units; the operands of a collective that overlaps others live until it ends.

    One that overlaps none is synchronous (openxla/xla, `hlo/transforms/convert_async_collectives_to_sync.cc`).
    """
    steps: list[Step] = []
    awaited: list[Instruction] = []
    started: dict[int, Step] = {}
    in_flight: set[int] = set()
    """Collectives that overlap nothing so far."""
    for k, part in order:
        if part == "end":
            if k not in in_flight:
                started[k].is_asynchronous = True
                is_sum = units[k][0].root.name == "all-reduce"
                awaited += [] if is_sum else [x for kernel in units[k] for x in kernel.operands]
        else:
            steps.append(Step(units[k], awaited))
            awaited = []
            if part == "start":
                started[k] = steps[-1]
                in_flight.add(k)
            elif not all(map(is_named, units[k])):
                in_flight.clear()
    if awaited:
        steps[-1].awaited += awaited
    return steps
