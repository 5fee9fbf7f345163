"""Arrays in files that survive a kill at any moment: two generations, checksums, and a record that commits.

Every array has two files. A step writes all arrays of the generation that is not current, syncs them, and then replaces
the record, which names the current generation and has the checksum of every part of every tile. Before that the old
generation is intact, behind it the new one is whole. Files have their full size from the start, so that a full disk is
an error before the first step, not in the middle of one.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ShardingError

RECORD = "state.json"
FORMAT = "sharding state files"

Part = tuple[tuple[int, ...], str]
"""Shape and dtype of an array of one tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A parameter in files: tiles of rows, each with the arrays that an update of it needs."""

    shape: tuple[int, ...]
    tiles: tuple[tuple[Part, ...], ...]
    """Of each tile its parts: rows of the parameter, then what the optimizer keeps of them."""
    state: str = ""
    """The structure of what the optimizer keeps."""

    @property
    def rows(self) -> list[tuple[int, int]]:
        """First and last row of each tile, exclusive; a scalar has none and is one tile."""
        ends = np.cumsum([tile[0][0][0] if self.shape else 1 for tile in self.tiles]).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def num_bytes(self) -> int:
        """Of one generation."""
        return sum(_num_bytes(part) for tile in self.tiles for part in tile)

    def offset(self, tile: int, part: int) -> int:
        """Where a part begins in the file."""
        before = [part for own in self.tiles[:tile] for part in own]
        return sum(map(_num_bytes, (*before, *self.tiles[tile][:part])))


class StateFiles:
    """The arrays of one directory; `step` is that of the current generation, None before the first commit."""

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        self.step: int | None = None
        self.entries: dict[str, Entry] = {}
        self._sums: dict[str, list[list[int]]] = {}
        self._next: dict[str, list[list[int] | None]] = {}
        if (self.directory / RECORD).exists():
            self._load()

    def add(self, name: str, entry: Entry) -> None:
        """Makes the files of a parameter, at their full size."""
        with self._errors(f"make room for {name}, 2 x {entry.num_bytes:,} bytes"):
            self.directory.mkdir(parents=True, exist_ok=True)
            for generation in (0, 1):
                with self._path(len(self.entries), generation).open("wb") as file:
                    if entry.num_bytes:
                        os.posix_fallocate(file.fileno(), 0, entry.num_bytes)
        self.entries[name] = entry
        self._next[name] = [None] * len(entry.tiles)

    def read(self, name: str, tile: int, parts: slice = slice(None)) -> list[np.ndarray]:
        """Parts of a tile of the current generation, copied out of the mapped file.

        Raises:
            ShardingError: the file is missing or cut off, or has another checksum than recorded.
        """
        entry, found = self.entries[name], []
        path = self._path([*self.entries].index(name), self._generation)
        for number in range(len(entry.tiles[tile]))[parts]:
            shape, dtype = entry.tiles[tile][number]
            data = _mapped(path, entry.offset(tile, number), _num_bytes((shape, dtype)))
            if data is None or zlib.crc32(data) != self._sums[name][tile][number]:
                raise ShardingError(
                    f"read {name} of step {self.step} from {str(self.directory)!r}",
                    found=f"{path.name}, tile {tile}: {'cut off' if data is None else 'another checksum'}",
                    required="the bytes that were written",
                    fix="a checkpoint, or a copy of the directory",
                )
            found.append(np.frombuffer(data, dtype).reshape(shape))
        return found

    def write(self, name: str, tile: int, arrays: Sequence[np.ndarray]) -> None:
        """Writes a tile of the next generation."""
        entry, sums = self.entries[name], []
        path = self._path([*self.entries].index(name), 1 - self._generation)
        with self._errors(f"write tile {tile} of {name}"), path.open("r+b") as file:
            file.seek(entry.offset(tile, 0))
            for array in arrays:
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                file.write(data)
                sums.append(zlib.crc32(data))
        self._next[name][tile] = sums

    def commit(self) -> None:
        """Makes the next generation the current one, all at once.

        Raises:
            ShardingError: a tile was not written, or the disk is full; the current generation stays.
        """
        missing = [
            f"{name}, tile {k}" for name, sums in self._next.items() for k, one in enumerate(sums) if one is None
        ]
        if missing:
            raise ShardingError(
                f"commit step {0 if self.step is None else self.step + 1} to {str(self.directory)!r}",
                found=[f"not written: {one}" for one in missing[:8]],
                required="every tile of every parameter",
            )
        step, generation = (0, 1 - self._generation) if self.step is None else (self.step + 1, 1 - self._generation)
        document = {
            "format": FORMAT,
            "step": step,
            "generation": generation,
            "entries": {
                name: {"shape": entry.shape, "tiles": entry.tiles, "state": entry.state, "checksums": self._next[name]}
                for name, entry in self.entries.items()
            },
        }
        text = json.dumps(document)
        with self._errors(f"commit step {step}"):
            for index in range(len(self.entries)):
                _sync(self._path(index, generation))
            new = self.directory / f"{RECORD}.new"
            new.write_text(json.dumps({"document": text, "crc32": zlib.crc32(text.encode())}))
            _sync(new)
            new.replace(self.directory / RECORD)
            _sync(self.directory)
        self.step, self._sums = step, {name: [*map(list, filter(None, one))] for name, one in self._next.items()}
        self.discard()

    def discard(self) -> None:
        """Forgets what was written since the last commit."""
        self._next = {name: [None] * len(entry.tiles) for name, entry in self.entries.items()}

    @property
    def _generation(self) -> int:
        return 1 if self.step is None else self.step % 2

    def _path(self, index: int, generation: int) -> Path:
        return self.directory / f"{index:06}.{generation}"

    def _load(self) -> None:
        try:
            stored = json.loads((self.directory / RECORD).read_text())
            if zlib.crc32(stored["document"].encode()) != stored["crc32"]:
                raise ValueError("another checksum")
            found = json.loads(stored["document"])
            self.step = found["step"]
            for name, one in found["entries"].items():
                tiles = tuple(tuple((tuple(shape), dtype) for shape, dtype in tile) for tile in one["tiles"])
                self.entries[name] = Entry(shape=tuple(one["shape"]), tiles=tiles, state=one["state"])
                self._sums[name] = one["checksums"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ShardingError(
                f"open the state in {str(self.directory)!r}",
                found=f"{RECORD}: {error}",
                required="the record of a commit",
                fix="a checkpoint, or a copy of the directory",
            ) from error
        self.discard()

    def _errors(self, asked: str) -> _DiskErrors:
        at = "nothing yet" if self.step is None else f"the state of step {self.step}, which is intact"
        return _DiskErrors(f"{asked} in {str(self.directory)!r}", at)


@dataclass(frozen=True, slots=True)
class _DiskErrors:
    """Turns what the file system refuses into an error that says what is left."""

    asked: str
    left: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise ShardingError(
                self.asked,
                found=[error.strerror or str(error), f"on disk: {self.left}"],
                required="a writable directory with space for two generations of the state",
                fix="free space, or another directory",
            ) from error


def tile_rows(num_rows: int, row_bytes: int, tile_bytes: int) -> list[int]:
    """Rows of each tile, of at most `tile_bytes`, but at least one row."""
    each = max(1, tile_bytes // max(1, row_bytes))
    return [min(each, num_rows - start) for start in range(0, num_rows, each)] or [num_rows]


def _num_bytes(part: Part) -> int:
    shape, dtype = part
    return math.prod(shape) * np.dtype(dtype).itemsize


def _mapped(path: Path, start: int, num_bytes: int) -> bytes | None:
    """Bytes of a file, read through a mapping that is gone afterwards; None if the file is shorter."""
    if not num_bytes:
        return b""
    page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), start + num_bytes - page, offset=page, access=mmap.ACCESS_READ) as mapped,
        ):
            return mapped[start - page :]
    except (OSError, ValueError):
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
