"""Disk faults: a full disk, a read-only disk, a corrupted file."""

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def limit_file_size(num_bytes: int) -> Iterator[None]:
    """Limits the size of files: writes beyond it fail as on a full disk, for root too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def largest_file(folder: Path) -> Path:
    """The largest file in a folder: in a checkpoint one with array data, which compresses least."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_bit(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Disk:
    """A small file system, for processes that a test starts."""

    def __init__(self, folder: Path):
        self.folder = folder

    def fill(self) -> None:
        """Fills the disk."""
        with (self.folder / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(1 << 12))
            except OSError as error:
                assert error.errno == errno.ENOSPC

    def free(self) -> None:
        """Frees the space taken by `fill`."""
        (self.folder / "ballast").unlink()

    def remount_read_only(self) -> None:
        """Makes every write fail."""
        _run("mount", "-o", "remount,ro", str(self.folder))


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 64) -> Iterator[Disk]:
    """A tmpfs mounted at `folder`; skips the test where it cannot be mounted."""
    folder.mkdir()
    if os.geteuid() != 0 or _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)):
        pytest.skip("mounting a file system needs root")
    try:
        yield Disk(folder)
    finally:
        _run("umount", "--lazy", str(folder))


def _run(*command: str) -> int:
    return subprocess.run(command, capture_output=True).returncode
