"""Tokens on disk: a sequence of files of one dtype, memory-mapped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHARD_TOKENS = 2**27
"""Tokens per file, except the last."""


def dtype(vocab: int) -> np.dtype:
    """The smallest unsigned little-endian dtype for `vocab` tokens."""
    return np.dtype(next(kind for kind in ("<u1", "<u2", "<u4") if vocab <= 2 ** (8 * np.dtype(kind).itemsize)))


class TokenWriter:
    """Appends tokens to files `NAME-00000.bin`, ... in a folder. A context manager."""

    def __init__(self, folder: Path, name: str, kind: np.dtype, *, shard_tokens: int = SHARD_TOKENS):
        self.folder, self.name, self.kind, self.shard_tokens = folder, name, kind, shard_tokens
        self.counts: list[int] = []
        """Tokens in each file."""
        self._file = None

    def write(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens."""
        left = np.asarray(tokens, self.kind)
        while len(left):
            if not self.counts or self.counts[-1] == self.shard_tokens:
                self._next()
            assert self._file is not None
            remaining = self.shard_tokens - self.counts[-1]
            self._file.write(left[:remaining].tobytes())
            self.counts[-1] += len(left[:remaining])
            left = left[remaining:]

    def _next(self) -> None:
        self.close()
        self._file = path(self.folder, self.name, len(self.counts)).open("wb")
        self.counts.append(0)

    def close(self) -> None:
        """Close the current file; raises pending write errors."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def path(folder: Path, name: str, number: int) -> Path:
    """The path of file `number`."""
    return folder / f"{name}-{number:05d}.bin"


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of several files as one array."""

    shards: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def windows(self, starts: Iterable[int], length: int) -> np.ndarray:
        """Windows of tokens [number of starts, length], as int32."""
        return np.stack([self._window(int(start), length) for start in starts])

    def _window(self, start: int, length: int) -> np.ndarray:
        parts = []
        for shard in self.shards:
            if length and start < len(shard):
                parts.append(shard[start : start + length])
                length -= len(parts[-1])
            start = max(0, start - len(shard))
        return np.concatenate(parts).astype(np.int32)


def open_tokens(folder: Path, name: str, kind: np.dtype, counts: Sequence[int]) -> Tokens:
    """The tokens that a `TokenWriter` has written."""
    return Tokens(
        tuple(np.memmap(path(folder, name, number), kind, "r", shape=(count,)) for number, count in enumerate(counts))
    )


def are_complete(folder: Path, name: str, kind: np.dtype, counts: Sequence[int]) -> bool:
    """Whether every file exists with its full length."""
    files = [(path(folder, name, number), count) for number, count in enumerate(counts)]
    return all(file.is_file() and file.stat().st_size == count * kind.itemsize for file, count in files)
