"""The output of all processes: each line prefixed with its process, library noise filtered out."""

import re
import sys
from collections import defaultdict, deque
from pathlib import Path
from typing import TextIO

NOISE = re.compile(
    r"\[Gloo\] Rank .*is connected to"
    r"|All log messages before absl::InitializeLog"
    r"|^[IW]\d{4} [\d:.]+ +\d+ "
    r"|^20\d\d-.*: [IW] (external/)?xla/"
)
"""Uninformative lines of libraries: gloo's connections, info and warnings of XLA's log."""

KEPT_ERRORS, SHOWN_ERRORS = 200, 30

_ERROR_START = re.compile(r"^(error: |Traceback \(most recent call last\)|Fatal Python error|[EF]\d{4} )")


class ProcessOutput:
    """Prints the lines of all processes and keeps the last stderr lines of each."""

    def __init__(self, *, all_lines: bool = False, folder: Path | None = None, out: TextIO | None = None):
        self._all, self._folder, self._out = all_lines, folder, out
        self._errors: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_ERRORS))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def log(self, text: str) -> None:
        """Print lines of the launcher itself."""
        for line in text.splitlines():
            self._print(f"[launch] {line}")

    def add(self, process: int, text: str, *, is_error: bool) -> None:
        """Print a line of a process."""
        if self._folder is not None:
            with (self._folder / f"process-{process}.log").open("a") as log:
                log.write(text + "\n")
        if NOISE.search(text):
            return
        if is_error:
            self._errors[process].append(text)
        if self._all or is_error or process == 0:
            self._print(f"[{process}] {text}")

    def forget_errors(self) -> None:
        """Drop the stderr lines of an earlier attempt."""
        self._errors.clear()

    def error(self, process: int) -> list[str]:
        """The last error of a process, from its first line on."""
        lines = [line for line in self._errors[process] if line.strip()]
        starts = [i for i, line in enumerate(lines) if _ERROR_START.search(line)]
        return lines[starts[-1] if starts else 0 :][-SHOWN_ERRORS:]

    def _print(self, line: str) -> None:
        print(line, file=self._out or sys.stdout, flush=True)
