"""The data of the page, as plain values for JSON.

name, mesh  the program's name; [axis, size] of each mesh axis of several devices, major first
devices, memory_bytes       the devices and the usable memory of one, if known
ops         the number of ops; the columns of `value_table.values` follow
collectives [kind, axes, count, bytes, wire bytes, seconds or null, line, cause, hint, op, dtype, ledger rows]
memory      null, or the peak, its breakdowns, and [array, first program point, further points] of all live ranges
tables      [title, [name, unit] of each column, rows] of further tables
time        null, or the step time in seconds and its breakdowns
slow        texts on a compilation that takes long
conflicts   [text, bytes lost, count, cure], most bytes first
layers      [component, the same with `*`] of paths that number equal layers
uneven, unknown     texts; [primitive, number of ops]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ...cost import Topology, collective_seconds
from ...display import Table
from ...display.axis_colors import drawn
from ...graph import Graph
from ...hardware import Platform
from ...memory import Usage, usage
from ...paths import Layers
from ...propagation import Assignment
from ...spec import axis_name
from ..collective_ledger import Collective
from ..compile_time import compile_time
from ..conflict_list import Conflicts
from ..live_arrays import Array
from ..memory_report import MemoryReport, report
from ..memory_timeline import memory_timeline
from ..predicted_collectives import communication
from ..step_time import TimedOp, estimate
from .value_table import Interned, values

Row = list[Any]

MAX_LISTED = 20
"""Arrays of the table of the largest ones; the page shows a few at first."""


def contents(
    assignment: Assignment,
    *,
    name: str,
    donated: Collection[int] = (),
    platform: Platform = "cpu",
    on: Topology | None = None,
    with_costs: bool = True,
    tables: Sequence[Table] = (),
) -> dict[str, Any]:
    """The data of the page for a completed program.

    Args:
        assignment: a spec per value.
        name: the program's name.
        donated: indices of the donated inputs of the graph.
        platform: the backend whose memory usage is predicted.
        on: the mesh on its devices, if they are known.
        with_costs: whether to compute memory and time; for tens of thousands of ops they take as long as all the rest.
        tables: further tables, shown under memory.
    """
    strings = Interned()
    graph = assignment.graph
    found = {
        "name": name,
        "mesh": list(drawn(assignment.sizes).items()),
        "devices": str(on.devices) if on is not None else "",
        "memory_bytes": (on.chip.usable_memory_bytes or on.chip.memory_bytes) if on is not None else None,
        "ops": len(graph.ops),
        **values(assignment, strings),
        "collectives": _collectives(communication(assignment, name=name), graph.layers, on),
        "memory": None,
        "tables": [
            [table.title, [[*column] for column in table.columns], [*map(list, table.rows)]] for table in tables
        ],
        "time": None,
        "slow": _slow_compilation(graph, platform),
        "with_costs": with_costs,
        "conflicts": _conflicts(assignment),
        "layers": list(graph.layers.stars.items()),
        "uneven": list(assignment.uneven),
        "unknown": sorted(graph.unknown.items()),
    }
    if with_costs:
        used = usage(assignment, donated, platform=platform)
        found["memory"] = _memory(assignment, used, report(assignment, used, name=name, platform=platform), strings)
        found["time"] = _time(assignment, on) if on is not None else None
    return {**found, "strings": strings.all()}


def _collectives(ledger: Sequence[Collective], layers: Layers, on: Topology | None) -> list[Row]:
    """Collectives that differ only in the layer index share a row; most bytes first."""
    rows: dict[tuple, Row] = {}
    for c in ledger:
        seconds = None if on is None else c.count * collective_seconds(c.kind, c.result_bytes, c.axes, on)
        cause, hint = layers.pattern(c.cause), layers.pattern(c.hint)
        texts = (c.source, c.cause, c.hint, c.op, c.dtype)
        amounts = (c.count, c.bytes, c.wire_bytes, seconds)
        key = (c.kind, c.axes, c.source, cause, hint, c.op, c.dtype)
        row = rows.setdefault(key, [c.kind, [*map(axis_name, c.axes)], 0, 0, 0, 0.0, *texts, 0])
        row[7:9] = [
            have if have == own else text for have, own, text in zip(row[7:9], texts[1:3], (cause, hint), strict=True)
        ]
        row[2:6] = [None if more is None else have + more for have, more in zip(row[2:6], amounts, strict=True)]
        row[-1] += 1
    return sorted(rows.values(), key=lambda row: -row[3])


def _memory(assignment: Assignment, used: Usage, peak: MemoryReport, strings: Interned) -> dict[str, Any]:
    timeline = memory_timeline(assignment, used)
    arrays = Interned()
    axes = Interned()

    def number(a: Array) -> int:
        texts = (a.name, a.kind, a.op, a.source, peak.layers.pattern(a.name))
        return arrays((a.num_bytes, *map(strings, texts), axes(a.axes)))

    return {
        "peak": peak.peak_bytes,
        "arguments": peak.argument_bytes,
        "results": peak.result_bytes,
        "temporaries": peak.temporary_bytes,
        "by_class": list(peak.by_class.items()),
        "by_axis": [
            (s.axis, s.num_devices, s.split_bytes, s.whole_bytes, s.saved_bytes)
            for s in peak.by_axis.values()
            if s.num_devices > 1
        ],
        "top": [
            (name, sum(a.num_bytes for a in own), own[0].kind, own[0].op, own[0].source, list(own[0].axes))
            for name, own in peak.grouped()[:MAX_LISTED]
        ],
        "lines": [strings(text) for text in timeline.sources],
        "depths": timeline.depths if any(timeline.depths) else [],
        "resident": [number(a) for a in timeline.resident],
        "transient": _flat((number(a), a.born, a.dies - a.born) for a in timeline.transient),
        "arrays": arrays.all(),
        "axes": axes.all(),
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
        "mfu": round(found.mfu, 4),
        "bound": found.bound_text,
        "by_op": _summed(found.parts, "name"),
        "by_source": _summed(found.parts, "source"),
    }


def _slow_compilation(graph: Graph, platform: Platform) -> list[str]:
    """The compile time and a hint; empty where it takes seconds."""
    found = compile_time(graph, platform)
    return [] if found.rough == "seconds" else str(found).splitlines()


def _summed(parts: Sequence[TimedOp], key: str) -> list[Row]:
    """[key, compute seconds, communication seconds, tasks], most first."""
    rows: dict[str, Row] = {}
    for p in parts:
        row = rows.setdefault(getattr(p, key), [getattr(p, key), 0.0, 0.0, 0])
        row[2 if p.is_collective else 1] += p.seconds
        row[3] += 1
    return sorted(rows.values(), key=lambda row: -row[1] - row[2])


def _conflicts(assignment: Assignment) -> list[Row]:
    found = Conflicts(assignment.conflicts, assignment.graph.layers).grouped()
    return [[one.text, one.bytes_lost, one.num, one.cure] for one in found]
