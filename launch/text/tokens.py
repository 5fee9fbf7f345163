"""Tokens on disk: numbers of one dtype in files one behind the other, mapped into memory and never read whole."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHARD_TOKENS = 2**27
"""In each file but the last."""


def dtype(vocab: int) -> np.dtype:
    """The least unsigned dtype that holds `vocab` different tokens; bytes as the machine has them, least first."""
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
            room = self.shard_tokens - self.counts[-1]
            self._file.write(left[:room].tobytes())
            self.counts[-1] += len(left[:room])
            left = left[room:]

    def _next(self) -> None:
        self.close()
        self._file = path(self.folder, self.name, len(self.counts)).open("wb")
        self.counts.append(0)

    def close(self) -> None:
        """Close the file that is open; raises what went wrong while it was written."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def path(folder: Path, name: str, number: int) -> Path:
    """The file of this number."""
    return folder / f"{name}-{number:05d}.bin"


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens in files, as if they were one array."""

    shards: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def windows(self, starts: Iterable[int], length: int) -> np.ndarray:
        """Tokens [number of starts, length] from each start on, as int32."""
        return np.stack([self._window(int(start), length) for start in starts])

    def _window(self, start: int, length: int) -> np.ndarray:
        parts = []
        for shard in self.shards:
            if length and start < len(shard):
                parts.append(shard[start : start + length])
                length -= len(parts[-1])
            start = max(0, start - len(shard))
        return np.concatenate(parts).astype(np.int32)


def opened(folder: Path, name: str, kind: np.dtype, counts: Sequence[int]) -> Tokens:
    """The tokens that a writer has written."""
    return Tokens(
        tuple(np.memmap(path(folder, name, number), kind, "r", shape=(count,)) for number, count in enumerate(counts))
    )


def are_there(folder: Path, name: str, kind: np.dtype, counts: Sequence[int]) -> bool:
    """Whether every file is there in full length."""
    files = [(path(folder, name, number), count) for number, count in enumerate(counts)]
    return all(file.is_file() and file.stat().st_size == count * kind.itemsize for file, count in files)
