"""Export of a simulated schedule in the Trace Event Format of Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .task_table import TaskTable

MICROSECONDS = 1000
"""One time unit is shown as a millisecond."""


def write_trace(
    path: str | Path, table: TaskTable, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> None:
    """Writes one complete event per task and one thread per device."""
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
            "ts": starts[device][position] * MICROSECONDS,
            "dur": (ends[device][position] - starts[device][position]) * MICROSECONDS,
            "args": task._asdict(),
        }
        for task, device, position in table.located()
    ]
    text = json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}, indent=1)
    Path(path).write_text(text, encoding="utf-8")
