"""Schedules as CSV files: a header line with the schedule's sizes, a line of columns, one line per task."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ShardingError, raise_together
from .task_table import KINDS, Task, TaskTable

SIZES = ("stages", "microbatches", "slices", "chunks", "microbatches_per_update")
REQUIRED = ("device", "kind", "stage", "microbatch")
COLUMNS = (*REQUIRED, "slice", "version")

Line = tuple[int, list[str]]
"""(line number, cells)."""


def write_csv(path: str | Path, table: TaskTable) -> None:
    """Writes a table that ``read_csv`` restores exactly."""
    head = {"name": table.name} | {name: getattr(table, name) for name in SIZES}
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(f"# {json.dumps(head)}\n")
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        lines.writerows([device, *task] for task, device, _ in table.located())


def read_csv(path: str | Path) -> dict[str, Any]:
    """The fields of the table in a file; sizes that its header lacks are inferred from the tasks.

    Raises:
        ShardingError: invalid columns, kinds or numbers, with their line.
    """
    asked = f"Schedule.from_csv({str(path)!r})"
    text = Path(path).read_text(encoding="utf-8-sig").splitlines()
    head = _header(asked, text[0]) if text and text[0].startswith("# {") else {}
    lines = [(n, next(csv.reader([line]))) for n, line in enumerate(text, 1) if line.strip() and line[0] != "#"]
    if len(lines) < 2:
        raise ShardingError(
            asked, found="no tasks", required=f"a line of columns, then one line per task: {','.join(COLUMNS)}"
        )
    columns = _columns(asked, lines[0])
    failures = [failure for line in lines[1:] for failure in _bad_cells(columns, line)]
    raise_together(asked, failures)
    _check_devices(asked, [int(cells[columns.index("device")]) for _, cells in lines[1:]])
    return _fields(Path(path).stem, columns, lines[1:]) | head


def _header(asked: str, line: str) -> dict[str, Any]:
    """The sizes in the header line."""
    must = f"JSON with any of name, {', '.join(SIZES)}"
    try:
        found = json.loads(line[1:])
    except json.JSONDecodeError:
        raise ShardingError(f"{asked}, line 1", found=line, required=must) from None
    unknown = sorted(set(found) - {"name", *SIZES})
    if not isinstance(found.get("name", ""), str):
        unknown.append(f"name {found['name']!r}")
    if unknown:
        raise ShardingError(f"{asked}, line 1", found=f"unknown: {', '.join(unknown)}", required=must)
    return found


def _columns(asked: str, line: Line) -> list[str]:
    number, cells = line
    columns = [cell.strip() for cell in cells]
    unknown = [f"unknown column {column!r}" for column in columns if column not in COLUMNS]
    missing = [f"no column {column!r}" for column in REQUIRED if column not in columns]
    twice = [f"column {column!r} twice" for column in COLUMNS if columns.count(column) > 1]
    if unknown or missing or twice:
        must = f"the columns {', '.join(REQUIRED)}, and optionally slice and version"
        raise ShardingError(f"{asked}, line {number}", found=[*unknown, *missing, *twice], required=must)
    return columns


def _bad_cells(columns: Sequence[str], line: Line) -> Iterator[ShardingError]:
    number, cells = line
    if len(cells) != len(columns):
        yield ShardingError(
            f"line {number}", found=f"{len(cells)} cells for {len(columns)} columns", required="one cell per column"
        )
        return
    for column, cell in zip(columns, map(str.strip, cells), strict=True):
        if column == "kind" and cell not in KINDS:
            yield ShardingError(f"line {number}", found=f"kind {cell!r}", required=f"one of {', '.join(KINDS)}")
        if column != "kind" and not (cell.isascii() and cell.isdigit()):
            yield ShardingError(f"line {number}", found=f"{column} {cell!r}", required="a non-negative integer")


def _check_devices(asked: str, devices: Sequence[int]) -> None:
    """Raises if a device number is skipped."""
    if len(set(devices)) <= max(devices):
        first = next(device for device in range(max(devices)) if device not in devices)
        there = f"tasks on device {max(devices)} and none on device {first}"
        raise ShardingError(asked, found=there, required="devices numbered from 0 without gaps")


def _fields(name: str, columns: Sequence[str], lines: Sequence[Line]) -> dict[str, Any]:
    """The tasks, and the sizes inferred from them."""
    orders: dict[int, list[Task]] = {}
    for _, cells in lines:
        row: dict[str, Any] = dict(zip(columns, map(str.strip, cells), strict=True))
        device, kind = int(row.pop("device")), row.pop("kind")
        numbers = {column: int(cell) for column, cell in row.items()}
        orders.setdefault(device, []).append(Task(kind, **numbers))
    tasks = [task for order in orders.values() for task in order]
    return {
        "name": name,
        "orders": [orders.get(device, []) for device in range(max(orders) + 1)],
        "stages": max(task.stage for task in tasks) + 1,
        "microbatches": max(task.microbatch for task in tasks) + 1,
        "slices": max(task.slice for task in tasks) + 1,
    }
