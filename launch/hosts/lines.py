"""What the processes of a program print, as one text: each line behind its process, noise left out."""

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
"""Lines of libraries that say nothing about the program: gloo's per connection, the log's info and warnings."""

KEPT_ERRORS, SHOWN_ERRORS = 200, 30

_BEGINS = re.compile(r"^(error: |Traceback \(most recent call last\)|Fatal Python error|[EF]\d{4} )")


class Lines:
    """Shows the lines of all processes, and keeps the last ones that each wrote to stderr."""

    def __init__(self, *, all_lines: bool = False, folder: Path | None = None, out: TextIO | None = None):
        self._all, self._folder, self._out = all_lines, folder, out
        self._errors: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_ERRORS))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        for line in text.splitlines():
            self._print(f"[launch] {line}")

    def add(self, process: int, text: str, *, is_error: bool) -> None:
        """A line that a process printed."""
        if self._folder is not None:
            with (self._folder / f"process-{process}.log").open("a") as log:
                log.write(text + "\n")
        if NOISE.search(text):
            return
        if is_error:
            self._errors[process].append(text)
        if self._all or is_error or process == 0:
            self._print(f"[{process}] {text}")

    def forget(self) -> None:
        """What was said belongs to an earlier start."""
        self._errors.clear()

    def error(self, process: int) -> list[str]:
        """The last error that a process wrote: from where it begins."""
        lines = [line for line in self._errors[process] if line.strip()]
        begins = [i for i, line in enumerate(lines) if _BEGINS.search(line)]
        return lines[begins[-1] if begins else 0 :][-SHOWN_ERRORS:]

    def _print(self, line: str) -> None:
        print(line, file=self._out or sys.stdout, flush=True)
