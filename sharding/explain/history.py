"""What a device holds at every moment of a call: the memory report's peak, for all steps.

A moment is one step; a loop or a branch counts the steps of its body once, before its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ..memory import Usage
from ..memory.liveness import Lifetimes
from ..propagation import Assignment
from .memory import Array, Arrays, readers, source


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The moments of a program and the arrays that are there, in bytes per device."""

    sources: tuple[str, ...]
    """Per moment the user's line that runs; empty where JAX kept none."""
    depths: tuple[int, ...]
    """Per moment in how many loops and branches it is."""
    lasting: tuple[Array, ...]
    """Arguments that are read and results with memory of their own: there throughout."""
    passing: tuple[Array, ...]
    """All others, each from the moment `born` to the moment `dies`."""

    def num_bytes(self) -> list[int]:
        """What is there at each moment, without gaps."""
        change = [0] * (len(self.sources) + 1)
        change[0] = sum(a.num_bytes for a in self.lasting)
        for a in self.passing:
            change[a.born] += a.num_bytes
            change[a.dies + 1] -= a.num_bytes
        found, now = [], 0
        for step in change[:-1]:
            now += step
            found.append(now)
        return found


def history(assignment: Assignment, usage: Usage) -> History:
    """All moments of a completed program whose memory is known."""
    walk = _Walk(Arrays(assignment, usage))
    passing = tuple(walk.body(usage.lifetimes, 0))
    last = max(len(walk.sources) - 1, 0)
    lasting = (*walk.arrays.arguments(), *walk.arrays.results())
    return History(
        sources=tuple(walk.sources) or ("",),
        depths=tuple(walk.depths) or (0,),
        lasting=tuple(dataclasses.replace(a, born=0, dies=last) for a in lasting),
        passing=passing,
    )


class _Walk:
    """One pass over the steps of a program and of the bodies inside them."""

    def __init__(self, arrays: Arrays):
        self.arrays = arrays
        self.sources: list[str] = []
        self.depths: list[int] = []

    def body(self, lifetimes: Lifetimes, depth: int) -> Iterator[Array]:
        """The arrays of a body; its moments are noted on the way."""
        begun, ended = [], []
        for k, step in enumerate(lifetimes.steps):
            begun.append(len(self.sources))
            for inner in lifetimes.inside.get(k, ()):
                yield from self.body(inner, depth + 1)
            ended.append(len(self.sources))
            self.sources.append(source(step.kernels[0].root, self.arrays.graph))
            self.depths.append(depth)
        phases = readers(lifetimes)
        for buffer in lifetimes.buffers:
            if not buffer.is_own or not buffer.num_bytes:
                continue
            ends = [*(born - 1 for born, _ in buffer.makers[1:]), buffer.dies]
            for k, ((born, _), dies) in enumerate(zip(buffer.makers, ends, strict=True)):
                if born <= dies:
                    array = self.arrays.held(buffer, k, lifetimes, phases)
                    yield dataclasses.replace(array, born=begun[born], dies=ended[dies])
