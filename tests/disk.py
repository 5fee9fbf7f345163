"""A disk that is full, may only be read, or spoils a file."""

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def no_room(num_bytes: int) -> Iterator[None]:
    """No file may grow past so many bytes: writing on fails, as on a full disk, also for root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def largest(folder: Path) -> Path:
    """The largest file in a folder: of a checkpoint one with the bits of arrays, which compress least."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    """Turn over one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Disk:
    """A file system of some megabytes, for processes that a test starts."""

    def __init__(self, folder: Path):
        self.folder = folder

    def fill(self) -> None:
        """Leave no room."""
        with (self.folder / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(1 << 12))
            except OSError as error:
                assert error.errno == errno.ENOSPC

    def empty(self) -> None:
        """Have room again."""
        (self.folder / "ballast").unlink()

    def close(self) -> None:
        """Let nothing be written."""
        _run("mount", "-o", "remount,ro", str(self.folder))


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 64) -> Iterator[Disk]:
    """A disk of its own at `folder`; the test is skipped where none can be mounted."""
    folder.mkdir()
    if os.geteuid() != 0 or _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)):
        pytest.skip("no file system can be mounted here: it takes root")
    try:
        yield Disk(folder)
    finally:
        _run("umount", "--lazy", str(folder))


def _run(*command: str) -> int:
    return subprocess.run(command, capture_output=True).returncode
