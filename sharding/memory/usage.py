"""Predicted memory of a completed program on one device, before compilation."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..graph.garbage_collection import no_collection
from ..hardware import Platform
from ..propagation import Assignment
from .compiler_traits import TRAITS, CompilerTraits
from .device_program import DeviceProgram, lower
from .heap_simulator import block_bytes, online_bytes
from .kernel_order import ORDERS
from .liveness import Lifetimes, lifetimes
from .moved_results import copy_moved_results
from .vector_memory import move_to_vmem

POINTER_BYTES = 8
"""Per result of a program with several: XLA:CPU returns a table of pointers."""


@dataclass(frozen=True, eq=False)
class Usage:
    """Memory of one call of a program, in bytes per device."""

    program: DeviceProgram
    lifetimes: Lifetimes
    aliases: Mapping[int, int]
    """Result -> the donated argument whose buffer it reuses."""
    traits: CompilerTraits

    @cached_property
    def argument_bytes(self) -> int:
        """The arguments of the compiled program."""
        return sum(x.stored_bytes for x in self.program.kept)

    @cached_property
    def result_bytes(self) -> int:
        """Results that do not alias an argument, and the table of pointers."""
        own = sum(x.stored_bytes for k, x in enumerate(self.program.outputs) if k not in self.aliases)
        return own + (POINTER_BYTES * len(self.program.outputs) if len(self.program.outputs) > 1 else 0)

    @cached_property
    def temporary_bytes(self) -> int:
        """The heap of temporaries, without those placed in the buffers of results."""
        pack = online_bytes if self.traits.packs_online else block_bytes
        return pack(self.lifetimes.intervals())

    @property
    def peak_bytes(self) -> int:
        """Argument + temp + output - alias, as `memory_analysis()` counts them."""
        return self.argument_bytes + self.result_bytes + self.temporary_bytes


@no_collection()
def usage(assignment: Assignment, donated: Collection[int] = (), *, platform: Platform = "cpu") -> Usage:
    """The memory of a completed program on one device, with some of the graph's inputs donated, by index."""
    traits = TRAITS[platform]
    program = lower(assignment, traits)
    aliases = donations(assignment, program, donated)
    pairs = [(program.inputs[a], k) for k, a in aliases.items()]
    holders = program.outputs if traits.reuses_results else ()
    found = lifetimes(program.body, pairs, {*program.outputs}, ORDERS[traits.schedule], holders=holders)
    if traits.packs_online:
        move_to_vmem(found)
    if traits.copies_moved_results:
        copy_moved_results(found, program.outputs, {program.outputs[k]: argument for argument, k in pairs}, traits)
    return Usage(program, found, aliases, traits)


def donations(assignment: Assignment, program: DeviceProgram, donated: Collection[int]) -> dict[int, int]:
    """Result -> the donated argument it aliases: itself, or the first of equal shape and dtype, as `jax.jit` pairs.

    Both are in the same kind of memory.
    """
    g = assignment.graph
    index = {v: k for k, v in enumerate(g.inputs) if k in donated}
    kinds, out_kinds = g.memory_kinds, g.output_memory_kinds
    found = {k: index[v] for k, v in enumerate(g.outputs) if v in index and out_kinds[k] == kinds.get(v)}
    free: defaultdict[object, deque[int]] = defaultdict(deque)
    for k in sorted({*donated} - {*found.values()}):
        v = g.inputs[k]
        free[g.shapes[v], g.dtypes[v], kinds.get(v), program.inputs[k].shape].append(k)
    for k, v in enumerate(g.outputs):
        matching = free.get((g.shapes[v], g.dtypes[v], out_kinds[k], program.outputs[k].shape))
        if k not in found and matching:
            found[k] = matching.popleft()
    return found
