"""VMEM of a TPU: arrays that one kernel leaves there for the next ones take no HBM.

XLA:TPU assigns it to arrays in the order of the time that they save, per square root of their bytes, as long as there
is room until they are last read, and as long as no two accesses are far apart (openxla/xla,
`service/memory_space_assignment`). Only kernels of several elementwise ops and reductions write to it: those of
products, of collectives, of single ops and of normalized rows write to HBM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from ..cost.flops import FLOPS
from .fusion import Kernel
from .instruction import Instruction
from .kernel_order import Step
from .liveness import Buffer, Lifetimes
from .primitive_traits import BARRIER, REDUCTIONS, SLICES
from .product_ends import is_product

NUM_BYTES = 48 * 2**20
"""Of the 64 MiB of a v5p; kernels work in the others."""
LONGEST_US = 500.0
"""Between two accesses of an array that stays."""
BYTES_PER_US, FLOPS_PER_US = 2.7e6, 459e6
"""Of a v5p."""
LOOP_RUNS = 5
"""That XLA assumes of each loop."""


@dataclass(slots=True, eq=False)
class _Value:
    """An array of a buffer."""

    num_bytes: int
    steps: list[int]
    """Of its body, at which it is written and read."""
    fits: bool
    """Whether VMEM may hold it."""
    instants: list[int] = field(default_factory=list)
    """Those of the steps."""
    saved_us: float = 0.0

    @property
    def priority(self) -> float:
        """What XLA sorts by."""
        return self.saved_us / math.sqrt(self.num_bytes)


@dataclass(slots=True, eq=False)
class _Timeline:
    """The instants of a program: a step follows those of its bodies."""

    elapsed_us: list[float] = field(default_factory=lambda: [0.0])
    """Before each instant."""
    values: list[tuple[Buffer, list[_Value]]] = field(default_factory=list)

    def add(self, lifetimes: Lifetimes, runs: int) -> None:
        """Adds the steps and values of a body, and how much time each saves."""
        instants, is_bound = [], []
        for k, step in enumerate(lifetimes.steps):
            for inner in lifetimes.nested.get(k, ()):
                self.add(inner, runs * LOOP_RUNS)
            moved, computed = _step_us(step)
            instants.append(len(self.elapsed_us) - 1)
            is_bound.append(moved >= computed)
            self.elapsed_us.append(self.elapsed_us[-1] + runs * max(moved, computed))
        for buffer, values in _values(lifetimes):
            for v in values:
                v.instants = [instants[k] for k in v.steps]
                v.saved_us = runs * sum(is_bound[k] for k in v.steps) * v.num_bytes / BYTES_PER_US
            self.values.append((buffer, values))

    def assigned(self) -> set[_Value]:
        """The values that VMEM holds from the first to the last access."""
        used = np.zeros(len(self.elapsed_us), np.int64)
        found = set()
        candidates = [v for _, values in self.values for v in values if v.fits and v.saved_us]
        for v in sorted(candidates, key=lambda v: (-v.priority, v.instants[0])):
            gaps = zip(v.instants, v.instants[1:], strict=False)
            if max(self.elapsed_us[b] - self.elapsed_us[a + 1] for a, b in gaps) > LONGEST_US:
                continue
            part = used[v.instants[0] : v.instants[-1] + 1]
            if part.max() + v.num_bytes <= NUM_BYTES:
                part += v.num_bytes
                found.add(v)
        return found


def move_to_vmem(lifetimes: Lifetimes) -> None:
    """Takes the arrays that VMEM holds out of the buffers of a program."""
    timeline = _Timeline()
    timeline.add(lifetimes, 1)
    held = timeline.assigned()
    for buffer, values in timeline.values:
        rest = [v for v in values if v not in held]
        if not rest:
            buffer.is_temporary = False
        elif len(rest) < len(values):
            buffer.born, buffer.dies = rest[0].steps[0], rest[-1].steps[-1]
    for body in _all(lifetimes):
        body.peak = None


def _values(lifetimes: Lifetimes) -> Iterator[tuple[Buffer, list[_Value]]]:
    """The temporary buffers of a body, and the arrays that each holds in turn."""
    readers: dict[Instruction, list[int]] = {}
    kernels: dict[Instruction, tuple[Step, Kernel]] = {}
    for k, step in enumerate(lifetimes.steps):
        for kernel in step.kernels:
            kernels[kernel.root] = step, kernel
            for x in () if _passes_on(kernel) else kernel.operands:
                readers.setdefault(x, []).append(k)
    for buffer in lifetimes.buffers:
        if not buffer.is_temporary or not buffer.num_bytes:
            continue
        found: list[_Value] = []
        for k, root in buffer.makers:
            step, kernel = kernels[root]
            if not found or not _passes_on(kernel):
                found.append(_Value(buffer.num_bytes, [k], _writes_to_vmem(step, kernel)))
            read = readers.get(root, ())
            found[-1].steps += read
            found[-1].fits &= root not in lifetimes.results and lifetimes.nested.keys().isdisjoint(read)
        for v in found:
            v.steps = sorted({*v.steps})
            v.fits &= len(v.steps) > 1
        found[-1].steps[-1] = max(found[-1].steps[-1], buffer.dies)
        yield buffer, found


def _all(lifetimes: Lifetimes) -> Iterator[Lifetimes]:
    yield lifetimes
    for bodies in lifetimes.nested.values():
        for body in bodies:
            yield from _all(body)


def _passes_on(kernel: Kernel) -> bool:
    """Whether a kernel only names an array."""
    root = kernel.root
    is_held_back = root.name == BARRIER or (root.role == "tuple-element" and root.operands[0].name == BARRIER)
    return is_held_back or kernel.is_view


def _writes_to_vmem(step: Step, kernel: Kernel) -> bool:
    """Whether a kernel may leave its result in VMEM."""
    if kernel.root.in_place or kernel.root.role not in ("fusible", "bitcast"):
        return False
    if any(is_product(m) or (m.name in REDUCTIONS and m is not kernel.root) for m in kernel.members):
        return False
    return len(step.kernels) > 1 or sum(m.role == "fusible" for m in kernel.members) > 1


def _step_us(step: Step) -> tuple[float, float]:
    """Microseconds in which a step reads and writes its arrays, and in which it multiplies."""
    kernels = [kernel for kernel in step.kernels if not _passes_on(kernel) and kernel.root.role != "argument"]
    if any(kernel.root.bodies for kernel in kernels):
        return 0.0, 0.0
    num_bytes = sum(kernel.root.stored_bytes for kernel in kernels) + sum(
        {x: _read_bytes(x, kernel) for kernel in kernels for x in kernel.operands}.values()
    )
    flops = sum(_flops(m) for kernel in kernels for m in kernel.members)
    return num_bytes / BYTES_PER_US, flops / FLOPS_PER_US


def _read_bytes(x: Instruction, kernel: Kernel) -> int:
    """How much a kernel reads of an array."""
    readers = [m for m in kernel.members if x in m.operands]
    if readers and all(m.name in SLICES for m in readers):
        return sum(m.num_bytes for m in readers)
    return x.stored_bytes


def _flops(one: Instruction) -> float:
    """Of a product or a convolution."""
    product = one.product
    if product is not None:
        return 2.0 * product.batch * product.rows * product.columns * product.summed
    if one.name == "conv_general_dilated" and one.eqn is not None:
        *operands, result = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (*one.operands, one))
        return FLOPS[one.name](operands, [result], one.eqn.params)
    return 0.0
