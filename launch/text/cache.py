"""Text tokenized once: the tokens and their tokenizer lie in a folder named by what they were made from."""

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

from . import tokenizer as tokenizers
from . import tokens
from .documents import Documents
from .tokenizer import Tokenizer

Kind = Literal["bytes", "bpe"]

FORMAT = 1
"""Changes when the same text would be tokenized otherwise."""

INDEX, TOKENIZER = "index.json", "tokenizer.json"
TRAIN, HELDOUT = "train", "heldout"
BATCH_DOCUMENTS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedText:
    """Tokens to train on and tokens held out, with their tokenizer and what identifies them."""

    tokenizer: Tokenizer
    train: tokens.Tokens
    heldout: tokens.Tokens
    train_bytes: int
    """That the training tokens stand for."""
    num_files: int
    num_bytes: int
    sha256: str
    """Of the text and its tokenizer."""

    @property
    def vocab(self) -> int:
        """Number of different tokens."""
        return len(self.tokenizer.num_bytes)

    def __str__(self) -> str:
        count = len(self.train) + len(self.heldout)
        return (
            f"{self.num_files} file{'s' * (self.num_files != 1)}, {self.num_bytes / 1e6:.2f} MB, {count:,} tokens "
            f"of {self.vocab:,} kinds, sha256 {self.sha256[:16]}"
        )


def default_folder() -> Path:
    """Where tokens are kept if nobody says otherwise: the user's cache, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sharding"


def prepare(documents: Documents, kind: Kind, *, vocab: int, folder: Path | None = None) -> TokenizedText:
    """The documents as tokens; made now if `folder` does not have them, which it then has.

    Args:
        documents: the text.
        kind: a byte a token, or byte pairs, learnt from what is not held out.
        vocab: at most so many tokens, for byte pairs.
        folder: of the cache; None for the user's.
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
            f"keep tokens in {str(folder)!r}",
            there=error.strerror or str(error),
            must="the folder must be one to write in, with room for the tokens",
            fix="--cache with another folder",
        ) from None
    found = _read(home, documents)
    assert found
    return found


def _move(part: Path, home: Path) -> None:
    try:
        (part / "whole").rename(home)
    except OSError:
        # Another process was faster: what it made is the same.
        if not home.is_dir():
            raise


def _write(part: Path, documents: Documents, kind: Kind, vocab: int) -> None:
    folder = part / "whole"
    folder.mkdir()
    if kind == "bpe":
        texts = (text for text, is_heldout in documents.sides() if not is_heldout)
        tokenizer: Tokenizer = tokenizers.learn(texts, vocab=vocab, num_bytes=documents.num_bytes)
    else:
        tokenizer = tokenizers.Bytes()
    tokenizers.save(tokenizer, folder / TOKENIZER)
    size = len(tokenizer.num_bytes)
    counted: dict[str, int] = dict.fromkeys((TRAIN, HELDOUT), 0)
    with (
        tokens.TokenWriter(folder, TRAIN, tokens.dtype(size)) as train,
        tokens.TokenWriter(folder, HELDOUT, tokens.dtype(size)) as heldout,
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
        "dtype": tokens.dtype(size).str,
        "tokens": {TRAIN: train.counts, HELDOUT: heldout.counts},
        "bytes": counted,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _tokenized(documents: Documents, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, bool]]:
    """The tokens of every document with its end, and whether it is held out."""
    sides = documents.sides()
    while group := list(islice(sides, BATCH_DOCUMENTS)):
        encoded = tokenizer.encode([text for text, _ in group])
        for found, (_, is_heldout) in zip(encoded, group, strict=True):
            yield np.append(np.asarray(found, np.uint32), np.uint32(tokenizers.END)), is_heldout


def _read(home: Path, documents: Documents) -> TokenizedText | None:
    """What lies in a folder of the cache; None if it is not there or not whole."""
    try:
        index: dict[str, Any] = json.loads((home / INDEX).read_text())
        kind, counts = np.dtype(index["dtype"]), index["tokens"]
        whole = all(tokens.are_there(home, name, kind, counts[name]) for name in (TRAIN, HELDOUT))
        if not whole or _file_sha256(home / TOKENIZER) != index["tokenizer_sha256"]:
            return None
    except (OSError, ValueError, KeyError):
        return None
    both = hashlib.sha256((index["text_sha256"] + index["tokenizer_sha256"]).encode()).hexdigest()
    return TokenizedText(
        tokenizer=tokenizers.load(home / TOKENIZER),
        train=tokens.opened(home, TRAIN, kind, counts[TRAIN]),
        heldout=tokens.opened(home, HELDOUT, kind, counts[HELDOUT]),
        train_bytes=index["bytes"][TRAIN],
        num_files=len(documents.paths),
        num_bytes=documents.num_bytes,
        sha256=both,
    )


def _file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
