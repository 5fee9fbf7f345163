"""A task of predicting the next token, turned to a user's own text."""

import math
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import corpus
from ..config import TextChoice
from ..metrics import bits_per_byte
from ..task import Looked, Task
from . import documents
from .cache import TokenizedText, prepare
from .source import TextSource
from .tokenizer import END

DEFAULT_VOCAB = 4096
VOCAB_MULTIPLE = 128
"""A model's vocabulary is rounded up to a multiple of this one, so that axes divide it."""


def read(choice: TextChoice) -> TokenizedText:
    """The text that `choice` names, tokenized; without files the sources of Python's standard library."""
    files = choice.files or _standard_library()
    kind = choice.tokenizer or "bpe"
    return prepare(documents.scan(files), kind, vocab=choice.vocab or DEFAULT_VOCAB, folder=choice.cache)


def _standard_library() -> list[Path]:
    """The sources of Python's standard library that hold anything."""
    return [path for path in corpus.source_paths(Path(sysconfig.get_path("stdlib"))) if path.stat().st_size]


def fitted(config: Any, text: TokenizedText) -> Any:
    """A model's configuration with a vocabulary for `text`; a larger one stays where tokens are bytes."""
    rounded = -(-text.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    keeps = text.vocab == 256 and config.vocab >= rounded
    return config if keeps else replace(config, vocab=rounded)


def over(task: Task, text: TokenizedText, *, batch_size: int, seed: int) -> Task:
    """`task` on `text`: its batches, its figures per byte of that text, and samples through its tokenizer.

    The training loss is shown per byte by the mean bytes of a training token; the held-out figure counts the bytes of
    every token that was predicted.
    """
    source = TextSource(text=text, batch_size=batch_size, length=task.config.context, seed=seed)
    num_tokens, num_bytes = source.heldout_size()
    tokens_per_byte = len(text.train) / text.train_bytes
    (heldout,) = task.heldout

    def score(batches: Sequence[Looked]) -> dict[str, float]:
        nats = sum(float(looked["nats"]) for looked in batches) / len(batches)
        return {heldout.name: bits_per_byte(nats * num_tokens / num_bytes)}

    def as_text(tokens: np.ndarray) -> str:
        return text.tokenizer.decode(tokens[1:])

    sampler = task.sampler and replace(task.sampler, prompt=np.array([END], np.int32), text=as_text)
    return replace(
        task,
        source=lambda size, seed: source,
        score=score,
        loss=replace(task.loss, scale=tokens_per_byte / math.log(2)),
        sampler=sampler,
    )
