"""Text files as documents, each in the training or the held-out split.

A file is one document; a longer one is cut at line ends into documents of about 16 KiB, so that even a single large
file has both splits. The split depends on a document's content: equal documents are in the same split.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sharding.errors import ShardingError

DOCUMENT_BYTES = 2**14
HELDOUT_ONE_IN = 20


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Text files, scanned and in order."""

    paths: tuple[Path, ...]
    num_documents: int
    num_bytes: int
    sha256: str
    """Checksum of the documents in order; file names are not part of it."""
    fallback_heldout: int
    """The smallest hash, whose document is held out if no other is; -1 if another is."""

    def with_split(self) -> Iterator[tuple[str, bool]]:
        """Every document in order, and whether it is held out. Raises an error if the files have changed."""
        digest = hashlib.sha256()
        for path in self.paths:
            for document in _read(path):
                digest.update(_hash(document))
                number = _number(document)
                yield document.decode(), number % HELDOUT_ONE_IN == 0 or number == self.fallback_heldout
        if digest.hexdigest() != self.sha256:
            raise ShardingError(
                "--data", found="files that changed since they were scanned", required="unchanged files"
            )


def scan(files: Sequence[Path]) -> Documents:
    """Read the documents of text files and of all files in folders, except hidden ones.

    Raises:
        ShardingError: some paths are missing, unreadable, empty or not UTF-8 text; lists all of them. Or there are
            fewer than two distinct documents.
    """
    paths, problems = _files(files)
    digest, numbers, num_bytes = hashlib.sha256(), [], 0
    for path in paths:
        try:
            for document in _read(path):
                _check(document)
                digest.update(_hash(document))
                numbers.append(_number(document))
                num_bytes += len(document)
        except (OSError, _NotText) as error:
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    if problems:
        raise ShardingError(
            _asked(files),
            found=[*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])],
            required="files of UTF-8 text, or folders of such files",
            fix="leave these files out",
        )
    if len(set(numbers)) < 2:
        raise ShardingError(
            _asked(files),
            found=f"{num_bytes} bytes in {len(paths)} files, {len(set(numbers))} distinct document",
            required=f"two distinct documents (training, held-out): two files or one over {DOCUMENT_BYTES:,} bytes",
            fix="more text",
        )
    return Documents(
        paths=tuple(paths),
        num_documents=len(numbers),
        num_bytes=num_bytes,
        sha256=digest.hexdigest(),
        fallback_heldout=min(numbers) if all(number % HELDOUT_ONE_IN for number in numbers) else -1,
    )


def _asked(files: Sequence[Path]) -> str:
    more = len(files) - 4
    return " ".join(["--data", *map(str, files[:4]), *([f"and {more} more"] if more > 0 else [])])


class _NotText(ValueError):
    """A file is not UTF-8 text."""


def _files(given: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The files to read, those of a folder sorted by name, and problems with the given paths."""
    paths: list[Path] = []
    problems: list[str] = []
    for path in given:
        if path.is_dir():
            found = _files_in(path)
            paths += found
            problems += [] if found else [f"{path}: no non-empty file"]
        elif not os.path.exists(path):
            problems.append(f"{path}: not found")
        elif not path.is_file():
            # Reading a pipe would block.
            problems.append(f"{path}: not a regular file")
        elif path.stat().st_size == 0:
            problems.append(f"{path}: empty")
        else:
            paths.append(path)
    return paths, problems


def _files_in(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    shown = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return sorted(shown, key=lambda path: path.relative_to(folder).as_posix())


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while document := file.read(DOCUMENT_BYTES):
            yield document + file.readline(DOCUMENT_BYTES) + _rest_of_character(file)


def _rest_of_character(file: BinaryIO) -> bytes:
    """The UTF-8 continuation bytes left of a character that a cut inside a very long line has split."""
    rest = b""
    while (byte := file.read(1)) and 0x80 <= byte[0] < 0xC0:
        rest += byte
    if byte:
        file.seek(-1, 1)
    return rest


def _check(document: bytes) -> None:
    if b"\0" in document:
        raise _NotText("binary: contains a zero byte")
    try:
        document.decode()
    except UnicodeDecodeError as error:
        raise _NotText(f"not UTF-8 text: {error.reason}, byte 0x{document[error.start]:02x}") from None


def _hash(document: bytes) -> bytes:
    return hashlib.sha256(document).digest()


def _number(document: bytes) -> int:
    return int.from_bytes(_hash(document)[:8], "big")
