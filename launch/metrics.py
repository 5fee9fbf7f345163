"""What a run measured, one JSON object a line, in a file that can be read while the run goes on.

A line holds `step` and some of the figures below; each figure's unit ends its name. Python writes floats so that they
read back to the same bits: two runs can be compared exactly.
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

Figures = Mapping[str, float | int]
"""Figures of one step: `loss` (nats), `gradient_norm`, `learning_rate`, `seconds`, `memory_bytes`; throughput and
held-out figures by the names that the task gives them, such as `tokens_per_second` and `heldout_bits_per_byte`; of
experts `auxiliary_loss`, `peak_load` (choices of the busiest over the mean) and `dropped_share` (of all choices)."""


def bits_per_byte(nats: float) -> float:
    """Nats a token as bits a byte, for tokens that are bytes."""
    return nats / math.log(2)


def memory_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
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
    """None keeps the figures here alone, where another process writes them."""
    lines: list[Figures] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._file = None
        if self.path is None:
            return
        # The lines that stay are complete beside the old file before they take its place.
        part = self.path.with_name(f".{self.path.name}.part")
        part.write_text("".join(map(_text, self.lines)))
        part.replace(self.path)
        self._file = self.path.open("a")

    def log(self, step: int, figures: Figures) -> None:
        """Append the figures of `step`, here and in the file."""
        line = {"step": step, **figures}
        self.lines.append(line)
        if self._file is not None:
            self._file.write(_text(line))
            self._file.flush()

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every line that has `name`."""
        return series(self.lines, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What a full disk did not take it does not take now either.
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()


def _text(line: Figures) -> str:
    return json.dumps(line) + "\n"


def start(out: Path) -> MetricsFile:
    """A new, empty metrics file in `out`."""
    return MetricsFile(path=out / FILE_NAME)


def resume(out: Path, *, step: int) -> MetricsFile:
    """The metrics file in `out` cut back to what was measured up to `step`, to go on from there."""
    path = out / FILE_NAME
    known = read(path) if path.exists() else []
    return MetricsFile(path=path, lines=[line for line in known if line["step"] <= step])


def read(path: Path) -> list[Figures]:
    """The lines of a metrics file. A last line that was cut short, by a crash, is left out."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def series(lines: list[Figures], name: str) -> list[tuple[int, float]]:
    """(step, value) of every line that has `name`."""
    return [(int(line["step"]), float(line[name])) for line in lines if name in line]
