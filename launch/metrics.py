"""The metrics file of a run: JSON lines, readable while the run continues.

A line holds `step` and some of the metrics below; each name ends with its unit. Python's floats round-trip exactly
through JSON, so two runs can be compared bit for bit.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

FILE_NAME = "metrics.jsonl"

MetricValues = Mapping[str, float | int]
"""Metrics of one step: `loss` (nats), `gradient_norm`, `learning_rate`, `seconds`, `memory_bytes`; on accelerators
`mfu` (model FLOPs utilization); throughput and held-out metrics under the workload's names, such as `tokens_per_second`
and `heldout_bits_per_byte`; for experts `auxiliary_loss`, `peak_load` (choices of the busiest expert over the mean) and
`dropped_share` (of all choices)."""


def bits_per_byte(nats: float) -> float:
    """Nats per token as bits per byte, for tokens that are bytes."""
    return nats / math.log(2)


def memory_bytes() -> int:
    """Resident memory of this process; 0 if the system doesn't report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    import resource

    return pages * resource.getpagesize()


@dataclass(kw_only=True)
class MetricsFile:
    """An open metrics file. `log` writes a line and flushes it."""

    path: Path | None
    """None keeps the metrics in memory, in processes other than process 0."""
    lines: list[MetricValues] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._file = None
        if self.path is None:
            return
        # Write the kept lines to a temporary file first, then replace the old one atomically.
        part = self.path.with_name(f".{self.path.name}.part")
        part.write_text("".join(map(_text, self.lines)))
        part.replace(self.path)
        self._file = self.path.open("a")

    def log(self, step: int, values: MetricValues) -> None:
        """Append the metrics of `step`, in memory and to the file."""
        line = {"step": step, **values}
        self.lines.append(line)
        if self._file is not None:
            self._file.write(_text(line))
            self._file.flush()

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every line with `name`."""
        return series(self.lines, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A flush that failed on a full disk fails again here.
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()


def _text(line: MetricValues) -> str:
    return json.dumps(line) + "\n"


def start(out: Path) -> MetricsFile:
    """A new, empty metrics file in `out`."""
    return MetricsFile(path=out / FILE_NAME)


def resume(out: Path, *, step: int) -> MetricsFile:
    """The metrics file in `out`, truncated after `step`, to continue from there."""
    path = out / FILE_NAME
    known = read(path) if path.exists() else []
    return MetricsFile(path=path, lines=[line for line in known if line["step"] <= step])


def read(path: Path) -> list[MetricValues]:
    """The lines of a metrics file, without a last line truncated by a crash."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def series(lines: list[MetricValues], name: str) -> list[tuple[int, float]]:
    """(step, value) of every line with `name`."""
    return [(int(line["step"]), float(line[name])) for line in lines if name in line]
