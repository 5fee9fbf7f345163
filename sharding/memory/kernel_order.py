"""Order in which a device runs its kernels.

XLA:CPU runs kernels in the order in which they become ready, which keeps many threads busy and many buffers live
(openxla/xla, `service/hlo_memory_scheduler.cc`, `BFSMemoryScheduler`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .collective_combining import combine_collectives
from .fusion import Kernel
from .instruction import Instruction


@dataclass(slots=True, eq=False)
class Step:
    """Kernels that run at once: one, or all-reduces that were combined."""

    kernels: list[Kernel]
    awaited: list[Instruction] = field(default_factory=list)
    """The operands of collectives that end before it."""
    is_in_place: bool = False
    """Whether its kernels write into their operands."""

    @property
    def operands(self) -> list[Instruction]:
        """What must be kept until here: the operands of its kernels, each once, and those awaited."""
        return list(dict.fromkeys([*(x for k in self.kernels for x in k.operands), *self.awaited]))


Order = Callable[[Sequence[Kernel], Sequence[Instruction]], list[Step]]
"""Kernels in program order, and results -> steps in execution order."""


def program_order(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """The kernels as in the program, nothing combined."""
    del results
    return [Step([kernel]) for kernel in kernels]


def xla_cpu_order(kernels: Sequence[Kernel], results: Sequence[Instruction]) -> list[Step]:
    """Breadth first, all-reduces combined, as on XLA:CPU."""
    return _breadth_first([Step(combined) for combined in combine_collectives(kernels, results)])


def _breadth_first(steps: Sequence[Step]) -> list[Step]:
    """The steps in the order in which they become ready."""
    step_of = {k.root: step for step in steps for k in step.kernels}
    readers: dict[Step, list[Step]] = {step: [] for step in steps}
    missing: dict[Step, int] = {}
    for step in steps:
        sources = dict.fromkeys(step_of[x] for x in step.operands if step_of[x] is not step)
        missing[step] = len(sources)
        for source in sources:
            readers[source].append(step)
    ready = deque(step for step in steps if not missing[step])
    order = []
    while ready:
        step = ready.popleft()
        order.append(step)
        for reader in readers[step]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    assert len(order) == len(steps)
    return order
