"""Cache of tokenized text: tokens and tokenizer in a folder named by a hash of what they were made from."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sharding.errors import ShardingError

from . import token_files
from . import tokenizer as tokenizers
from .documents import Documents
from .tokenizer import Tokenizer

Kind = Literal["bytes", "bpe"]

FORMAT = 1
"""Version of the tokenization; changes when the same text would give different tokens."""

INDEX, TOKENIZER, TOKENS = "index.json", "tokenizer.json", "tokens"
TRAIN, HELDOUT = "train", "heldout"
BATCH_DOCUMENTS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedText:
    """Training and held-out tokens, with their tokenizer and checksum."""

    tokenizer: Tokenizer
    train: token_files.Tokens
    heldout: token_files.Tokens
    train_bytes: int
    """Bytes that the training tokens encode."""
    num_files: int
    num_bytes: int
    sha256: str
    """Checksum of the text and its tokenizer."""

    @property
    def vocab(self) -> int:
        """Vocabulary size."""
        return len(self.tokenizer.num_bytes)

    def __str__(self) -> str:
        count = len(self.train) + len(self.heldout)
        return (
            f"{self.num_files} file{'s' * (self.num_files != 1)}, {self.num_bytes / 1e6:.2f} MB, {count:,} tokens "
            f"(vocabulary {self.vocab:,}), sha256 {self.sha256[:16]}"
        )


def default_folder() -> Path:
    """The default cache folder, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sharding"


def prepare(documents: Documents, kind: Kind, *, vocab: int, folder: Path | None = None) -> TokenizedText:
    """The documents as tokens, from the cache or tokenized now and cached.

    Args:
        documents: the text.
        kind: one token per byte, or byte-pair encoding trained on the training split.
        vocab: maximum BPE vocabulary size.
        folder: the cache; None for the user's.
    """
    library = tokenizers.version() if kind == "bpe" else ""
    key = hashlib.sha256(json.dumps([FORMAT, documents.sha256, kind, vocab if library else 256, library]).encode())
    folder = folder if folder is not None else default_folder()
    home = folder / key.hexdigest()[:32]
    found = _read(home, documents)
    if found:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-", ignore_cleanup_errors=True) as part:
            _write(Path(part), documents, kind, vocab)
            _move(Path(part), home)
    except OSError as error:
        raise ShardingError(
            f"cache tokens in {str(folder)!r}",
            found=error.strerror or str(error),
            required="a writable folder with free space",
            fix="--cache with another folder",
        ) from None
    found = _read(home, documents)
    assert found
    return found


def _move(part: Path, home: Path) -> None:
    try:
        (part / TOKENS).rename(home)
    except OSError:
        # Another process was faster; its result is the same.
        if not home.is_dir():
            raise


def _write(part: Path, documents: Documents, kind: Kind, vocab: int) -> None:
    folder = part / TOKENS
    folder.mkdir()
    if kind == "bpe":
        texts = (text for text, is_heldout in documents.with_split() if not is_heldout)
        tokenizer: Tokenizer = tokenizers.train_bpe(texts, vocab=vocab, num_bytes=documents.num_bytes)
    else:
        tokenizer = tokenizers.Bytes()
    tokenizers.save(tokenizer, folder / TOKENIZER)
    size = len(tokenizer.num_bytes)
    counted: dict[str, int] = dict.fromkeys((TRAIN, HELDOUT), 0)
    with (
        token_files.TokenWriter(folder, TRAIN, token_files.dtype(size)) as train,
        token_files.TokenWriter(folder, HELDOUT, token_files.dtype(size)) as heldout,
    ):
        for text_tokens, is_heldout in _tokenized(documents, tokenizer):
            writer = heldout if is_heldout else train
            writer.write(text_tokens)
            counted[writer.name] += int(tokenizer.num_bytes[text_tokens].sum())
    index = {
        "format": FORMAT,
        "text_sha256": documents.sha256,
        "tokenizer_sha256": _file_sha256(folder / TOKENIZER),
        "vocab": size,
        "dtype": token_files.dtype(size).str,
        "tokens": {TRAIN: train.counts, HELDOUT: heldout.counts},
        "bytes": counted,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _tokenized(documents: Documents, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, bool]]:
    """The tokens of every document, end token included, and whether it is held out."""
    split = documents.with_split()
    while group := list(islice(split, BATCH_DOCUMENTS)):
        encoded = tokenizer.encode([text for text, _ in group])
        for found, (_, is_heldout) in zip(encoded, group, strict=True):
            yield np.append(np.asarray(found, np.uint32), np.uint32(tokenizers.END)), is_heldout


def _read(home: Path, documents: Documents) -> TokenizedText | None:
    """The contents of a cache folder; None if it is missing or corrupted."""
    try:
        index: dict[str, Any] = json.loads((home / INDEX).read_text())
        kind, counts = np.dtype(index["dtype"]), index["tokens"]
        complete = all(token_files.are_complete(home, name, kind, counts[name]) for name in (TRAIN, HELDOUT))
        if not complete or _file_sha256(home / TOKENIZER) != index["tokenizer_sha256"]:
            return None
    except (OSError, ValueError, KeyError):
        return None
    both = hashlib.sha256((index["text_sha256"] + index["tokenizer_sha256"]).encode()).hexdigest()
    return TokenizedText(
        tokenizer=tokenizers.load(home / TOKENIZER),
        train=token_files.open_tokens(home, TRAIN, kind, counts[TRAIN]),
        heldout=token_files.open_tokens(home, HELDOUT, kind, counts[HELDOUT]),
        train_bytes=index["bytes"][TRAIN],
        num_files=len(documents.paths),
        num_bytes=documents.num_bytes,
        sha256=both,
    )


def _file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
