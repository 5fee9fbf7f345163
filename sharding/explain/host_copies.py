"""Copies between a device and the memory of its host, of a completed program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from ..graph import Op
from ..hardware import Chip
from ..propagation import Assignment
from ..spec import local_shape

Direction = Literal["from host", "to host"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """One copy of a program, as one device runs it."""

    direction: Direction
    dtype: str
    array_bytes: int
    """Of the device's shard."""
    count: int
    """Runs per call of the program; of one iteration, in a loop of unknown length."""
    source: str
    """The user's line, `file.py:line (function)`; empty if unknown."""

    @property
    def bytes(self) -> int:
        """Bytes of all runs."""
        return self.count * self.array_bytes

    def seconds(self, chip: Chip) -> float:
        """Time of all runs on a chip's link to its host, with nothing else on it."""
        return self.count * (chip.host_wire.latency_seconds + self.array_bytes / chip.host_wire.total_bytes_per_second)

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{self.direction}, {times}{self.array_bytes} bytes of {self.dtype}: {self.source}"


def host_copies(assignment: Assignment) -> tuple[HostCopy, ...]:
    """The copies of a completed program, in program order; without dead code."""
    moving = (op for op in assignment.graph.live_ops if op.name == "device_put")
    return tuple(copy for op in moving for copy in host_copies_of(op, assignment) if copy.bytes)


def host_copies_of(op: Op, assignment: Assignment) -> Iterator[HostCopy]:
    """The copy that an op is; none if it stays in one memory."""
    graph = assignment.graph
    if op.name != "device_put" or not graph.changes_memory(op):
        return
    (v,) = op.results
    num = math.prod(local_shape(assignment.specs[v].axes, graph.shapes[v], assignment.sizes))
    yield HostCopy(
        direction="to host" if v in graph.memory_kinds else "from host",
        dtype=graph.dtype_names[v],
        array_bytes=num * graph.itemsize(v),
        count=op.times,
        source=op.source,
    )
