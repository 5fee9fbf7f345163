"""Entries kept on disk beside JAX's persistent compilation cache, under its settings.

`jax_compilation_cache_dir` is where they are, `jax_enable_compilation_cache` turns them off, and together they take at
most `jax_compilation_cache_max_size` bytes, the least recently used removed first. Any number of processes may read and
write: an entry is written to a temporary file that is then renamed. An entry that cannot be read, or is damaged, is
ignored with a warning and written anew. Entries are JSON: reading one executes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
import zlib
from pathlib import Path
from typing import Any

import jax

from .. import compat
from ..errors import warn

FOLDER = "sharding-completions"
"""In JAX's directory."""
SUFFIX, UNFINISHED = ".json.z", ".tmp"
STALE_SECONDS = 3600.0
"""A temporary file of this age is what a process that was killed left."""


def directory() -> Path | None:
    """The directory of the entries; None if JAX's cache is off."""
    config: Any = jax.config
    where = config.jax_compilation_cache_dir
    if not where or not config.jax_enable_compilation_cache or config.jax_compilation_cache_max_size == 0:
        return None
    if "://" not in str(where):
        return Path(where) / FOLDER
    from etils import epath  # as JAX reads and writes buckets

    return epath.Path(where) / FOLDER  # pyright: ignore[reportReturnType]  # has the methods of a Path


def read(key: str) -> Any:
    """The entry of a key; None if there is none, or none that is valid."""
    folder = directory()
    if folder is None:
        return None
    path = folder / f"{key}{SUFFIX}"
    try:
        if not path.exists():
            return None
        found = _unpacked(path.read_bytes())
    except (OSError, ValueError) as error:
        report_unusable(key, error)
        return None
    with contextlib.suppress(OSError):  # of another user, or read-only
        os.utime(path)
    return found


def report_unusable(key: str, error: Exception) -> None:
    """Warns that an entry is not used; the one that is written in its place will be."""
    warn(f"{directory()}/{key}{SUFFIX} is ignored and written anew: {type(error).__name__}: {error}")


def write(key: str, entry: Any) -> None:
    """Writes an entry, and removes the least recently used ones where all would be too large.

    On many hosts only process 0 writes, as with JAX's cache.
    """
    folder = directory()
    if folder is None or compat.distributed().process_id:
        return
    data = _packed(entry)
    limit = jax.config.jax_compilation_cache_max_size  # pyright: ignore[reportAttributeAccessIssue]
    if 0 <= limit < len(data):
        return
    temporary = folder / f"{key}-{uuid.uuid4().hex}{UNFINISHED}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if limit >= 0:
            _make_room(folder, limit - len(data), key)
        temporary.write_bytes(data)
        temporary.replace(folder / f"{key}{SUFFIX}")
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        warn(f"{folder}: a completion is not cached: {type(error).__name__}: {error}")


def _make_room(folder: Path, num_bytes: int, key: str) -> None:
    """Removes the least recently used entries until the others, without that of `key`, take at most `num_bytes`."""
    entries: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # removed by another process
            modified, size = _age_and_size(path)
            if path.name.endswith(SUFFIX) and path.name != f"{key}{SUFFIX}":
                entries.append((modified, size, path))
            elif path.name.endswith(UNFINISHED) and modified < time.time() - STALE_SECONDS:
                path.unlink(missing_ok=True)
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= num_bytes:
            return
        total -= size
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _age_and_size(path: Any) -> tuple[float, int]:
    """When a file was last modified, and its bytes."""
    found = path.stat()
    return (found.st_mtime, found.st_size) if hasattr(found, "st_size") else (found.mtime, found.length)  # etils


def _packed(entry: Any) -> bytes:
    data = zlib.compress(json.dumps(entry, separators=(",", ":")).encode(), level=1)
    return hashlib.sha256(data).digest() + data


def _unpacked(data: bytes) -> Any:
    checksum, rest = data[:32], data[32:]
    if hashlib.sha256(rest).digest() != checksum:
        raise ValueError("damaged: its checksum differs")
    return json.loads(zlib.decompress(rest))
