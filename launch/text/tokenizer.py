"""Tokenizers: one token per byte, or byte-pair encoding (BPE) trained on the text itself.

Token 0 ends a document. Every token encodes a known number of bytes, so metrics per byte can be compared between
tokenizers; the end of a document counts as one byte in all of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import optional_packages

END = 0
"""The token that ends a document."""

END_TEXT = "<|endoftext|>"
TRAINING_BYTES = 2**28
"""BPE is trained on at most about this many bytes, sampled evenly from the text."""


class Tokenizer(Protocol):
    """Encodes text as tokens and decodes it."""

    @property
    def num_bytes(self) -> np.ndarray:
        """Bytes per token, [vocabulary]."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | np.ndarray]:
        """The tokens of each text, without the end."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens [N]; the end of a document becomes a newline, invalid UTF-8 the replacement character."""
        ...


@dataclass(frozen=True)
class Bytes:
    """One token per byte; the zero byte, which text does not contain, ends a document."""

    num_bytes: np.ndarray = field(default_factory=lambda: np.ones(256, np.int64))

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | np.ndarray]:
        """The tokens of each text, without the end."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens [N]."""
        return bytes(tokens.astype(np.uint8).tolist()).replace(b"\0", b"\n").decode(errors="replace")


@dataclass(frozen=True)
class Bpe:
    """Byte-level BPE of the package `tokenizers`; lossless for any text."""

    inner: Any
    num_bytes: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        # Text that spells the end-of-document token is encoded as text.
        self.inner.encode_special_tokens = True
        vocabulary = self.inner.get_vocab()
        lengths = np.zeros(len(vocabulary), np.int64)
        for token, number in vocabulary.items():
            # The package writes each byte as one character.
            lengths[number] = 1 if number == END else len(token)
        object.__setattr__(self, "num_bytes", lengths)

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | np.ndarray]:
        """The tokens of each text, without the end."""
        return [found.ids for found in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens [N]; ids beyond the vocabulary, from a rounded-up model vocabulary, are dropped."""
        known = tokens[tokens < len(self.num_bytes)]
        parts = np.split(known, np.flatnonzero(known == END))
        return "\n".join(self.inner.decode(part[part != END].tolist()) for part in parts)


def version() -> str:
    """The version of the package `tokenizers`; raises an error with the install command if it is missing."""
    return optional_packages.version("tokenizers", "--tokenizer bpe", "--tokenizer bytes")


def train_bpe(texts: Iterable[str], *, vocab: int, num_bytes: int) -> Bpe:
    """BPE trained on `texts` of `num_bytes` in total: at most `vocab` tokens, fewer if the text has fewer pairs."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_sample(texts, num_bytes), trainer)
    return Bpe(inner)


def _sample(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    stride = -(-num_bytes // TRAINING_BYTES)
    return (text for number, text in enumerate(texts) if number % stride == 0)


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Save a tokenizer for `load`."""
    path.write_text(tokenizer.inner.to_str() if isinstance(tokenizer, Bpe) else "bytes")


def load(path: Path) -> Tokenizer:
    """Load a saved tokenizer."""
    text = path.read_text()
    if text == "bytes":
        return Bytes()
    version()
    from tokenizers import Tokenizer as Inner

    return Bpe(Inner.from_str(text))
