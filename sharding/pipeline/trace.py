"""A timed schedule in the Trace Event Format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .table import Table

MICROSECONDS = 1000
"""A unit of time is shown as a millisecond."""


def write_trace(
    path: str | Path, table: Table, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> None:
    """Writes a complete event per task, a thread per device."""
    names = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": table.name}}]
    names += [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": device, "args": {"name": f"device {device}"}}
        for device in range(table.devices)
    ]
    events = [
        {
            "name": task.label,
            "cat": task.kind,
            "ph": "X",
            "pid": 0,
            "tid": device,
            "ts": starts[device][place] * MICROSECONDS,
            "dur": (ends[device][place] - starts[device][place]) * MICROSECONDS,
            "args": task._asdict(),
        }
        for task, device, place in table.located()
    ]
    text = json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}, indent=1)
    Path(path).write_text(text, encoding="utf-8")
