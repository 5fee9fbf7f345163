"""The live buffers of a device over one call: the memory report's peak, at every program point.

A program point is one step of the schedule; a loop or branch contributes the steps of its body once, before its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..memory import Usage
from ..memory.liveness import Lifetimes
from ..propagation import Assignment
from .live_arrays import Array, LiveArrays, readers, source


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """The program points of a call and the arrays that are live at each, in bytes per device."""

    sources: tuple[str, ...]
    """Per program point the user's line; empty where JAX recorded none."""
    depths: tuple[int, ...]
    """Per program point the number of enclosing loops and branches."""
    resident: tuple[Array, ...]
    """Arguments that are read and results with memory of their own: live throughout."""
    transient: tuple[Array, ...]
    """All other arrays, each live from the program point `born` to `dies`."""

    def num_bytes(self) -> list[int]:
        """Live bytes at each program point, without gaps."""
        change = [0] * (len(self.sources) + 1)
        change[0] = sum(a.num_bytes for a in self.resident)
        for a in self.transient:
            change[a.born] += a.num_bytes
            change[a.dies + 1] -= a.num_bytes
        found, now = [], 0
        for step in change[:-1]:
            now += step
            found.append(now)
        return found


def memory_timeline(assignment: Assignment, usage: Usage) -> MemoryTimeline:
    """The timeline of a completed program, from its memory usage."""
    points = _ProgramPoints(LiveArrays(assignment, usage))
    points.body(usage.lifetimes, 0)
    last = max(len(points.sources) - 1, 0)
    resident = (*points.arrays.arguments(), *points.arrays.results())
    return MemoryTimeline(
        sources=tuple(points.sources) or ("",),
        depths=tuple(points.depths) or (0,),
        resident=tuple(dataclasses.replace(a, born=0, dies=last) for a in resident),
        transient=tuple(points.transient),
    )


class _ProgramPoints:
    """One pass over the steps of a program and of the bodies inside them."""

    def __init__(self, arrays: LiveArrays):
        self.arrays = arrays
        self.sources: list[str] = []
        self.depths: list[int] = []
        self.transient: list[Array] = []

    def body(self, lifetimes: Lifetimes, depth: int) -> None:
        """Records the program points and the arrays of a body, after those of the bodies inside it."""
        begun, ended = [], []
        for k, step in enumerate(lifetimes.steps):
            begun.append(len(self.sources))
            for inner in lifetimes.nested.get(k, ()):
                self.body(inner, depth + 1)
            ended.append(len(self.sources))
            self.sources.append(source(step.kernels[0].root, self.arrays.graph))
            self.depths.append(depth)
        phases = readers(lifetimes)
        for buffer in lifetimes.buffers:
            if not buffer.is_temporary or not buffer.num_bytes:
                continue
            ends = [*(born - 1 for born, _ in buffer.makers[1:]), buffer.dies]
            for k, ((born, _), dies) in enumerate(zip(buffer.makers, ends, strict=True)):
                if born <= dies:
                    array = self.arrays.buffer_array(buffer, k, lifetimes, phases)
                    self.transient.append(dataclasses.replace(array, born=begun[born], dies=ended[dies]))
