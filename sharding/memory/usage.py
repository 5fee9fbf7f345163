"""The memory that one device needs for a completed program, predicted before anything compiles."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..propagation import Assignment
from .device import lower
from .liveness import Lifetimes, program_lifetimes
from .lowering import DeviceProgram
from .packing import block_bytes
from .schedule import as_ready, as_written

POINTER_BYTES = 8
"""Of each result that is one of several: XLA:CPU returns a table of them."""


@dataclass(frozen=True, eq=False)
class Usage:
    """What a device holds over one call of a program, in bytes per device."""

    program: DeviceProgram
    lifetimes: Lifetimes
    aliases: Mapping[int, int]
    """Result -> the donated argument whose memory it takes."""

    @cached_property
    def argument_bytes(self) -> int:
        """Arguments that the program reads; `jax.jit` drops the others."""
        return sum(x.num_bytes for x in self.program.inputs if x in self.read)

    @cached_property
    def read(self) -> frozenset:
        """The instructions that some result depends on."""
        return frozenset(self.program.body.needed())

    @cached_property
    def result_bytes(self) -> int:
        """Results that take no argument's place."""
        own = sum(x.num_bytes for k, x in enumerate(self.program.outputs) if k not in self.aliases)
        return own + (POINTER_BYTES * len(self.program.outputs) if len(self.program.outputs) > 1 else 0)

    @cached_property
    def temporary_bytes(self) -> int:
        """The block of memory for what is between arguments and results, and has no room where results will be."""
        return block_bytes(self.lifetimes.intervals())

    @property
    def peak_bytes(self) -> int:
        """What `memory_analysis()` calls argument + temp + output - alias."""
        return self.argument_bytes + self.result_bytes + self.temporary_bytes


def usage(assignment: Assignment, donated: Collection[int] = (), *, platform: str = "cpu") -> Usage:
    """The memory of a completed program on one device.

    Args:
        assignment: a spec per value.
        donated: which of the graph's inputs are donated.
        platform: whose compiler orders the kernels. `"cpu"` runs what is ready first, and some dots of 16-bit floats
            in 32 bits; of the others, which aim at little memory, it is taken that they keep to the order of the
            program.
    """
    program = lower(assignment, platform)
    aliases = donations(assignment, program, donated)
    order = as_ready if platform == "cpu" else as_written
    return Usage(program, program_lifetimes(program, aliases, order), aliases)


def donations(assignment: Assignment, program: DeviceProgram, donated: Collection[int]) -> dict[int, int]:
    """Result -> the donated argument whose memory it takes: its own, or the first alike, as `jax.jit` pairs them."""
    g = assignment.graph
    place = {v: k for k, v in enumerate(g.inputs) if k in donated}
    found = {k: place[v] for k, v in enumerate(g.outputs) if v in place}
    free: defaultdict[object, deque[int]] = defaultdict(deque)
    for k in sorted({*donated} - {*found.values()}):
        free[g.shapes[g.inputs[k]], g.dtypes[g.inputs[k]], program.inputs[k].shape].append(k)
    for k, v in enumerate(g.outputs):
        alike = free.get((g.shapes[v], g.dtypes[v], program.outputs[k].shape))
        if k not in found and alike:
            found[k] = alike.popleft()
    return found
