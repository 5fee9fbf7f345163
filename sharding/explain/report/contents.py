"""What the page shows, as plain lists, numbers and texts that JSON can hold.

name, mesh  the program; [axis, devices along it] each, major first
devices, memory_bytes       what the devices are and have, where that is known
ops, and all of `values`
collectives [kind, axes, times, bytes, wire bytes, seconds or null, line, cause, hint, op, dtype, ledger rows]
memory      null, or peak, what it is made of, and [array, first moment, moments] for all that is there at any time
time        null, or the step's seconds and what they are made of
conflicts   [text, bytes lost, how many alike]
uneven, unknown     texts; primitives with the number of their ops
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ... import paths
from ...cost import Topology, collective_seconds
from ...memory import Usage, usage
from ...propagation import Assignment
from ...spec import axis_name
from ..communication import communication
from ..estimate import Part, estimate
from ..history import history
from ..ledger import Collective
from ..memory import Array, MemoryReport, report
from .values import Interned, values

Row = list[Any]


def contents(
    assignment: Assignment,
    *,
    name: str,
    donated: Collection[int] = (),
    platform: str = "cpu",
    on: Topology | None = None,
    with_costs: bool = True,
) -> dict[str, Any]:
    """All that the page shows of a completed program.

    Args:
        assignment: a spec per value.
        name: of the program.
        donated: which of the graph's inputs are donated.
        platform: whose compiler the memory follows.
        on: the mesh on its devices, where it is known what they are.
        with_costs: whether to work out memory and time, which of tens of thousands of ops takes as long as all else.
    """
    strings = Interned()
    graph = assignment.graph
    found = {
        "name": name,
        "mesh": list(assignment.sizes.items()),
        "devices": str(on.devices) if on is not None else "",
        "memory_bytes": on.chip.memory_bytes if on is not None else None,
        "ops": len(graph.ops),
        **values(assignment, strings),
        "collectives": _collectives(communication(assignment, name=name), on),
        "memory": None,
        "time": None,
        "with_costs": with_costs,
        "conflicts": _conflicts(assignment),
        "uneven": list(assignment.uneven),
        "unknown": sorted(graph.unknown.items()),
    }
    if with_costs:
        used = usage(assignment, donated, platform=platform)
        found["memory"] = _memory(assignment, used, report(assignment, used, name=name), strings)
        found["time"] = _time(assignment, on) if on is not None else None
    return {**found, "strings": strings.all()}


def _collectives(ledger: Sequence[Collective], on: Topology | None) -> list[Row]:
    """Those that differ in a layer's index only in one row, most bytes first."""
    rows: dict[tuple, Row] = {}
    for c in ledger:
        seconds = None if on is None else c.count * collective_seconds(c.kind, c.result_bytes, c.axes, on)
        texts = (c.source, paths.pattern(c.cause), paths.pattern(c.hint), c.op, c.dtype)
        amounts = (c.count, c.bytes, c.wire_bytes, seconds)
        row = rows.setdefault((c.kind, c.axes, *texts), [c.kind, [*map(axis_name, c.axes)], 0, 0, 0, 0.0, *texts, 0])
        row[2:6] = [None if more is None else have + more for have, more in zip(row[2:6], amounts, strict=True)]
        row[-1] += 1
    return sorted(rows.values(), key=lambda row: -row[3])


def _memory(assignment: Assignment, used: Usage, peak: MemoryReport, strings: Interned) -> dict[str, Any]:
    past = history(assignment, used)
    arrays = Interned()
    axes = Interned()

    def number(a: Array) -> int:
        return arrays((a.num_bytes, *map(strings, (a.name, a.kind, a.op, a.source)), axes(a.axes)))

    return {
        "peak": peak.peak_bytes,
        "arguments": peak.argument_bytes,
        "results": peak.result_bytes,
        "temporaries": peak.temporary_bytes,
        "by_class": list(peak.by_class.items()),
        "by_axis": [
            (s.axis, s.num_devices, s.split_bytes, s.whole_bytes, s.saved_bytes) for s in peak.by_axis.values()
        ],
        "top": [(a.name, a.num_bytes, a.kind, a.op, a.source, list(a.axes)) for a in peak.top()],
        "lines": [strings(text) for text in past.sources],
        "depths": past.depths if any(past.depths) else [],
        "lasting": [number(a) for a in past.lasting],
        "passing": _flat((number(a), a.born, a.dies - a.born) for a in past.passing),
        "arrays": arrays.all(),
        "divided": axes.all(),
    }


def _flat(rows: Iterator[tuple[int, int, int]]) -> list[int]:
    return [number for row in sorted(rows, key=lambda row: row[1]) for number in row]


def _time(assignment: Assignment, on: Topology) -> dict[str, Any]:
    found = estimate(assignment, on)
    return {
        "seconds": found.seconds,
        "compute": found.compute_seconds,
        "communication": found.communication_seconds,
        "exposed": found.exposed_seconds,
        "measured": bool(on.chip.collectives),
        "by_op": _summed(found.parts, "name"),
        "by_source": _summed(found.parts, "source"),
    }


def _summed(parts: Sequence[Part], key: str) -> list[Row]:
    """[key, seconds computing, seconds sending, tasks], most first."""
    rows: dict[str, Row] = {}
    for p in parts:
        row = rows.setdefault(getattr(p, key), [getattr(p, key), 0.0, 0.0, 0])
        row[2 if p.is_collective else 1] += p.seconds
        row[3] += 1
    return sorted(rows.values(), key=lambda row: -row[1] - row[2])


def _conflicts(assignment: Assignment) -> list[Row]:
    rows: dict[str, Row] = {}
    for c in assignment.conflicts:
        text = paths.pattern(str(c))
        row = rows.setdefault(text, [text, 0, 0])
        row[1] += c.bytes_lost
        row[2] += 1
    return list(rows.values())
