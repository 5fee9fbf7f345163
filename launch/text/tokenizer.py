"""Text to tokens and back: a byte a token, or byte pairs learnt from the text itself.

Token 0 ends a document. Every token stands for a known number of bytes, so figures per byte can be compared between
tokenizers; the end of a document counts as one byte with each of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import extra

END = 0
"""The token that ends a document."""

END_TEXT = "<|endoftext|>"
LEARN_BYTES = 2**28
"""Byte pairs are learnt from at most about so much text, spread over all of it."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def num_bytes(self) -> np.ndarray:
        """How many bytes each token stands for, [vocabulary]."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | np.ndarray]:
        """The tokens of each text, without the end."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens [N]; the end of a document is a new line, what is no text is marked."""
        ...


@dataclass(frozen=True)
class Bytes:
    """A byte a token; the zero byte, which text does not hold, ends a document."""

    num_bytes: np.ndarray = field(default_factory=lambda: np.ones(256, np.int64))

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | np.ndarray]:
        """The tokens of each text, without the end."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens [N]."""
        return bytes(tokens.astype(np.uint8).tolist()).replace(b"\0", b"\n").decode(errors="replace")


@dataclass(frozen=True)
class Bpe:
    """Byte pairs of the package `tokenizers`, which loses nothing: any text comes back as it was."""

    inner: Any
    num_bytes: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        # Text that reads like the end of a document is text.
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
        """The text of tokens [N]; numbers beyond the vocabulary, which a model may be rounded up to, are nothing."""
        known = tokens[tokens < len(self.num_bytes)]
        parts = np.split(known, np.flatnonzero(known == END))
        return "\n".join(self.inner.decode(part[part != END].tolist()) for part in parts)


def version() -> str:
    """The version of the package `tokenizers`; an error that says how to get it if it is not there."""
    return extra.version("tokenizers", "--tokenizer bpe", "--tokenizer bytes")


def learn(texts: Iterable[str], *, vocab: int, num_bytes: int) -> Bpe:
    """Byte pairs learnt from `texts` of `num_bytes` in all: at most `vocab` tokens, fewer if the text has no more."""
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
    inner.train_from_iterator(_spread(texts, num_bytes), trainer)
    return Bpe(inner)


def _spread(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    stride = -(-num_bytes // LEARN_BYTES)
    return (text for number, text in enumerate(texts) if number % stride == 0)


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Write what `load` needs."""
    path.write_text(tokenizer.inner.to_str() if isinstance(tokenizer, Bpe) else "bytes")


def load(path: Path) -> Tokenizer:
    """The tokenizer that was saved."""
    text = path.read_text()
    if text == "bytes":
        return Bytes()
    version()
    from tokenizers import Tokenizer as Inner

    return Bpe(Inner.from_str(text))
