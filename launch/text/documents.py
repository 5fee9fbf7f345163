"""Text files as documents, each of them either to train on or held out.

A file is one document; a longer one is cut at line ends into documents of about 16 KiB, so that one large file has
both sides too. The side goes by the document's content: equal documents are on the same side.
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
    """Text files that were read once and are in order."""

    paths: tuple[Path, ...]
    num_documents: int
    num_bytes: int
    sha256: str
    """Of the documents and their order; the names of the files are no part of it."""
    lowest: int
    """The least of the documents' numbers: the one that is held out if none is by its own right."""

    def sides(self) -> Iterator[tuple[str, bool]]:
        """Every document and whether it is held out, in order. Raises an error if the files have changed."""
        digest = hashlib.sha256()
        for path in self.paths:
            for document in _read(path):
                digest.update(_hash(document))
                number = _number(document)
                yield document.decode(), number % HELDOUT_ONE_IN == 0 or number == self.lowest
        if digest.hexdigest() != self.sha256:
            raise ShardingError("--data", there="files that changed while they were read", must="the text must stay")


def scan(files: Sequence[Path]) -> Documents:
    """The documents of text files and of all files in folders, hidden ones left out; every file is read.

    Raises:
        ShardingError: a path that is not there, cannot be read, is empty or is no UTF-8 text; all of them listed. Or
            less text than two documents.
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
        except (OSError, _NoText) as error:
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    if problems:
        raise ShardingError(
            _asked(files),
            there=[*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])],
            must="each must be a file of UTF-8 text, or a folder of such files",
            fix="leave these out",
        )
    if len(set(numbers)) < 2:
        raise ShardingError(
            _asked(files),
            there=f"{num_bytes} bytes in {len(paths)} files, which is {len(set(numbers))} document without repetitions",
            must=f"one document to train on and one to hold out: two files, or one longer than {DOCUMENT_BYTES} bytes",
            fix="more text",
        )
    return Documents(
        paths=tuple(paths),
        num_documents=len(numbers),
        num_bytes=num_bytes,
        sha256=digest.hexdigest(),
        lowest=min(numbers) if all(number % HELDOUT_ONE_IN for number in numbers) else -1,
    )


def _asked(files: Sequence[Path]) -> str:
    more = len(files) - 4
    return " ".join(["--data", *map(str, files[:4]), *([f"and {more} more"] if more > 0 else [])])


class _NoText(ValueError):
    """Why a file is no text."""


def _files(given: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The files to read, those of a folder by name, and what is wrong with what was given."""
    paths: list[Path] = []
    problems: list[str] = []
    for path in given:
        if path.is_dir():
            inside = _inside(path)
            paths += inside
            problems += [] if inside else [f"{path}: no file that holds anything"]
        elif not os.path.exists(path):
            problems.append(f"{path}: not there")
        elif not path.is_file():
            # Reading a pipe would wait.
            problems.append(f"{path}: no file")
        elif path.stat().st_size == 0:
            problems.append(f"{path}: empty")
        else:
            paths.append(path)
    return paths, problems


def _inside(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    shown = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return sorted(shown, key=lambda path: path.relative_to(folder).as_posix())


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while document := file.read(DOCUMENT_BYTES):
            yield document + file.readline(DOCUMENT_BYTES) + _rest_of_character(file)


def _rest_of_character(file: BinaryIO) -> bytes:
    """What is left of a character after a cut inside a very long line: UTF-8's continuation bytes."""
    rest = b""
    while (byte := file.read(1)) and 0x80 <= byte[0] < 0xC0:
        rest += byte
    if byte:
        file.seek(-1, 1)
    return rest


def _check(document: bytes) -> None:
    if b"\0" in document:
        raise _NoText("binary: it holds a zero byte")
    try:
        document.decode()
    except UnicodeDecodeError as error:
        raise _NoText(f"no UTF-8 text: {error.reason}, the byte 0x{document[error.start]:02x}") from None


def _hash(document: bytes) -> bytes:
    return hashlib.sha256(document).digest()


def _number(document: bytes) -> int:
    return int.from_bytes(_hash(document)[:8], "big")
