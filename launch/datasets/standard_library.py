"""The sources of the running Python's standard library as training text, one token per byte.

The split into training and held-out text is by file. A batch is a function of the seed and the step: a run resumes with
the batches it would have seen, on any mesh.
"""

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sharding.errors import ShardingError

NUM_TOKENS = 256
END_OF_FILE = 0
"""Ends a file in the text and starts one in a prompt; Python sources contain no zero byte."""

HELDOUT_ONE_IN = 20

SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages test tests idle_test __pycache__ ensurepip turtledemo".split()
    # Tables, generated text and demonstrations.
    + "encodings pydoc_data idlelib lib2to3".split()
)
# Generated when Python was built; they differ between machines with the same Python.
SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Training and held-out bytes, with their checksum."""

    name: str
    train: np.ndarray
    heldout: np.ndarray
    num_files: int
    sha256: str

    @property
    def num_bytes(self) -> int:
        """Training and held-out bytes."""
        return len(self.train) + len(self.heldout)

    def __str__(self) -> str:
        megabytes = self.num_bytes / 1e6
        return f"{self.name}: {self.num_files} files, {megabytes:.2f} MB, sha256 {self.sha256[:16]}"


def read(folder: str | os.PathLike[str] | None = None) -> Corpus:
    """The corpus of all Python sources under `folder`, by default the running standard library."""
    root = Path(folder if folder is not None else sysconfig.get_path("stdlib"))
    paths = source_paths(root)
    digest = hashlib.sha256()
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in paths:
        name = path.relative_to(root).as_posix()
        text = path.read_bytes().replace(b"\0", b"") + bytes([END_OF_FILE])
        digest.update(name.encode() + b"\0" + text)
        parts[is_heldout(name)].append(text)
    if not (parts[True] and parts[False]):
        raise ShardingError(
            f"read the Python sources under {str(root)!r}",
            found=f"{len(parts[False])} training files, {len(parts[True])} held out",
            required="at least one file in each split",
            fix="a Python whose standard library is on disk as sources",
        )
    name = "Python sources" if folder is not None else f"standard library of Python {platform.python_version()}"
    return Corpus(
        name=name,
        train=_tokens(parts[False]),
        heldout=_tokens(parts[True]),
        num_files=len(paths),
        sha256=digest.hexdigest(),
    )


def source_paths(root: Path) -> list[Path]:
    """Every .py file of the corpus under `root`, sorted by name."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for name in files:
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith(SKIPPED_PREFIXES) and not path.is_symlink():
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def is_heldout(name: str) -> bool:
    """Whether the file of this name, relative to the library, is held out; about one in twenty is."""
    first_bytes = hashlib.sha256(name.encode()).digest()[:4]
    return int.from_bytes(first_bytes, "big") % HELDOUT_ONE_IN == 0


def train_batch(
    corpus: Corpus, *, batch_size: int, length: int, seed: int, step: int, rows: np.ndarray | None = None
) -> np.ndarray:
    """Training tokens [batch_size, length + 1] of `step`, or these rows of them: inputs and the targets, shifted by
    one."""
    generator = np.random.default_rng((seed, step))
    starts = generator.integers(0, len(corpus.train) - length, size=batch_size)
    return _windows(corpus.train, starts if rows is None else starts[rows], length)


def heldout_batches(corpus: Corpus, *, batch_size: int, length: int, num_batches: int) -> list[np.ndarray]:
    """`num_batches` batches [batch_size, length + 1], always the same, spread evenly over the held-out text."""
    last = len(corpus.heldout) - length - 1
    starts = np.linspace(0, last, batch_size * num_batches).astype(np.int64)
    return [_windows(corpus.heldout, rows, length) for rows in starts.reshape(num_batches, batch_size)]


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def _tokens(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts), dtype=np.uint8)
