"""The heartbeat of a process: reports of its progress to the supervisor that started it, if any."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

HEARTBEAT_FD = "SHARDING_PULSE"
"""Environment variable: the file descriptor to which a process writes its reports."""

UP = "up"
"""Reported before the first step: all processes are connected."""

FINISHED = "finished"
"""Reported after the last step."""

COMPILING, WORKING = "compiling", "working"
"""Reported before a compilation, and as a sign of life between steps."""

STATUSES = (UP, COMPILING, WORKING, FINISHED)
"""All reports other than step numbers."""


def report_step(step: int) -> None:
    """Reports that `step` is finished. After the first such report the supervisor treats silence as a hang."""
    report(str(step))


def report_working() -> None:
    """Reports a sign of life during a long operation between two steps."""
    report(WORKING)


@contextlib.contextmanager
def reporting_compilation() -> Iterator[None]:
    """Reports that this process compiles, which may take longer than the supervisor's timeout for a step."""
    report(COMPILING)
    try:
        yield
    finally:
        report(WORKING)


def report_finished() -> None:
    """Reports that no more steps follow: the rest may take any time."""
    report(FINISHED)


def report(text: str) -> None:
    """Writes a report to the supervisor that started this process, if any."""
    if HEARTBEAT_FD in os.environ:
        with contextlib.suppress(OSError):
            os.write(int(os.environ[HEARTBEAT_FD]), f"{text}\n".encode())
