"""Runs a command whose standard output has no reader any more, as `head` leaves it."""

import os
import subprocess
from pathlib import Path


def run_into_a_closed_pipe(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, cwd=folder)
    finally:
        os.close(writer)
