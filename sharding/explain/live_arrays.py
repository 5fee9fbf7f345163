"""The arrays in a device's memory at the peak: each with its name, category, source lines and axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from .. import compat
from ..graph import Graph
from ..memory import POINTER_BYTES, Usage
from ..memory.instruction import Instruction
from ..memory.liveness import Buffer, Lifetimes
from ..propagation import Assignment
from ..spec import axis_name
from . import array_categories
from .array_categories import Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array that is live at the peak."""

    name: str
    """Its path or annotated name; for an unnamed array its local type, as `float32[2, 16]`."""
    kind: Category
    op: str
    """The primitive or collective that produces it; empty for arguments."""
    num_bytes: int
    """Per device."""
    axes: tuple[str, ...]
    """The mesh axes that it is sharded over."""
    born: int
    """The step that produces it."""
    dies: int
    """The last step that reads it."""
    source: str
    """The user's line that produces it; empty for arguments."""
    last_source: str
    """The user's line that reads it last."""
    saved_bytes: Mapping[str, int]
    """Mesh axis that it is not sharded over -> bytes per device that sharding it would save; 0 if no dim divides."""


class LiveArrays:
    """The arrays in a program's memory: arguments, results, and the buffers that are live at the peak."""

    def __init__(self, assignment: Assignment, found: Usage):
        self.assignment, self.graph, self.usage = assignment, assignment.graph, found
        self.argument_kinds = array_categories.of_arguments(self.graph, found)
        self.shapes = {
            tuple(sorted(self.graph.shapes[v]))
            for v, kind in zip(self.graph.inputs, self.argument_kinds, strict=True)
            if kind == "parameters" and self.graph.shapes[v]
        }

    def arrays(self) -> tuple[Array, ...]:
        found = [*self.arguments(), *self.results(), *self.live_at_peak(self.usage.lifetimes)]
        return tuple(sorted(found, key=lambda a: (-a.num_bytes, a.born, a.name)))

    def arguments(self) -> Iterator[Array]:
        end = len(self.usage.lifetimes.steps) - 1
        for x, kind in zip(self.usage.program.inputs, self.argument_kinds, strict=True):
            if x in self.usage.program.kept:
                yield self.array(x, kind, x.num_bytes, 0, end, "", "")

    def results(self) -> Iterator[Array]:
        end = len(self.usage.lifetimes.steps) - 1
        outputs = self.usage.program.outputs
        for k, (x, v) in enumerate(zip(outputs, self.graph.outputs, strict=True)):
            table = POINTER_BYTES if len(outputs) > 1 else 0
            own = 0 if k in self.usage.aliases else x.num_bytes
            if own + table:
                yield self.array(x, "results", own + table, 0, end, x.name, "", value=v)

    def live_at_peak(self, lifetimes: Lifetimes) -> Iterator[Array]:
        """The buffers live at the peak of a body, and in the loops and branches in it that run then."""
        while timeline := lifetimes.timeline():
            step = max(range(len(timeline)), key=timeline.__getitem__)
            phases = readers(lifetimes)
            for buffer in lifetimes.buffers:
                if buffer.is_temporary and buffer.born <= step <= buffer.dies:
                    now = max(k for k, (born, _) in enumerate(buffer.makers) if born <= step)
                    yield self.buffer_array(buffer, now, lifetimes, phases)
            inner = lifetimes.nested.get(step, ())
            if not inner:
                return
            lifetimes = max(inner, key=Lifetimes.peak_bytes)

    def buffer_array(
        self, buffer: Buffer, now: int, lifetimes: Lifetimes, phases: Mapping[Instruction, Collection[str]]
    ) -> Array:
        """The array with index `now` among those that a buffer holds in turn."""
        born, x = buffer.makers[now]
        later = [m for _, m in buffer.makers[now + 1 :]] if x.name in ("broadcast", "copy") else []
        kind = array_categories.of_array([x, *later], phases, self.shapes, self.graph)
        last = source(lifetimes.steps[buffer.dies].kernels[0].root, self.graph)
        return self.array(x, kind, buffer.num_bytes, born, buffer.dies, x.name, last)

    def array(
        self,
        x: Instruction,
        kind: Category,
        num_bytes: int,
        born: int,
        dies: int,
        op: str,
        last: str,
        value: int | None = None,
    ) -> Array:
        v = x.value if value is None else value
        axes = self.axes(x, v)
        return Array(
            name=self.label(x, v),
            kind=kind,
            op=op,
            num_bytes=num_bytes,
            axes=axes,
            born=born,
            dies=dies,
            source=source(x, self.graph) if op else "",
            last_source=last,
            saved_bytes=self.saved(x, num_bytes, axes),
        )

    def label(self, x: Instruction, v: int | None) -> str:
        name = self.graph.first_names.get(v) if v is not None else None
        dtype = self.graph.dtypes[v] if v is not None else getattr(x.eqn and x.eqn.outvars[0].aval, "dtype", "")
        return name or f"{dtype}{list(x.shape)}"

    def axes(self, x: Instruction, v: int | None) -> tuple[str, ...]:
        """The axes that an array is sharded over, by its value's spec or by the reshard that it is a step of."""
        if v is None:
            return ()
        step = x.reshard
        spec = self.assignment.specs[v] if step is None or step.spec is None else step.spec
        shards = spec.num_shards(self.assignment.sizes)
        if math.prod(self.graph.shapes[v]) > x.num_elements * max(1, shards // 2) or shards == 1:
            return tuple(dict.fromkeys(axis_name(a).partition(":")[0] for axes in spec.axes for a in axes))
        return ()

    def saved(self, x: Instruction, num_bytes: int, axes: tuple[str, ...]) -> dict[str, int]:
        """Bytes that sharding over each further axis would save."""
        sizes = self.assignment.sizes
        return {
            axis: num_bytes - num_bytes // size if any(n % size == 0 for n in x.shape) else 0
            for axis, size in sizes.items()
            if axis not in axes and size > 1
        }


def readers(lifetimes: Lifetimes) -> dict[Instruction, set[str]]:
    """Instruction -> the phases of a body that read its result."""
    found: dict[Instruction, set[str]] = {}
    for step in lifetimes.steps:
        for kernel in step.kernels:
            phases = {m.phase for m in kernel.members}
            for operand in kernel.operands:
                found.setdefault(operand, set()).update(phases)
    return found


def source(x: Instruction, graph: Graph) -> str:
    """The user's line of an instruction, of a resharded argument that of its reader; empty where JAX recorded none."""
    line = compat.source_line(x.eqn) if x.eqn is not None else ""
    line = line or (graph.source(x.value) if x.value is not None else "")
    return line or (compat.source_line(step.asked_by) if (step := x.reshard) is not None and step.asked_by else "")
