"""A language-model workload on the user's own text."""

import math
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config.text_config import TextOptions
from ..datasets import standard_library
from ..metrics import bits_per_byte
from ..workload import EvalOutput, Workload
from . import documents
from .text_batches import TextSource
from .token_cache import TokenizedText, prepare
from .tokenizer import END

DEFAULT_VOCAB = 4096
VOCAB_MULTIPLE = 128
"""A model's vocabulary is rounded up to a multiple of this, so that mesh axes divide it."""


def read(options: TextOptions) -> TokenizedText:
    """The text of `options`, tokenized; without files the sources of Python's standard library."""
    files = options.files or _standard_library()
    kind = options.tokenizer or "bpe"
    return prepare(documents.scan(files), kind, vocab=options.vocab or DEFAULT_VOCAB, folder=options.cache)


def _standard_library() -> list[Path]:
    """The non-empty sources of Python's standard library."""
    return [path for path in standard_library.source_paths(Path(sysconfig.get_path("stdlib"))) if path.stat().st_size]


def resize_vocab(config: Any, text: TokenizedText) -> Any:
    """A model's configuration with a vocabulary for `text`; with byte tokens a larger vocabulary is kept."""
    rounded = -(-text.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    keeps = text.vocab == 256 and config.vocab >= rounded
    return config if keeps else replace(config, vocab=rounded)


def use_text(workload: Workload, text: TokenizedText, *, batch_size: int, seed: int) -> Workload:
    """`workload` with the batches of `text`, metrics per byte of it, and samples through its tokenizer.

    The training loss per byte uses the mean bytes per training token; the held-out metric counts the bytes of each
    target token.
    """
    source = TextSource(text=text, batch_size=batch_size, length=workload.config.context, seed=seed)
    num_tokens, num_bytes = source.heldout_size()
    tokens_per_byte = len(text.train) / text.train_bytes
    (heldout,) = workload.heldout

    def score(batches: Sequence[EvalOutput]) -> dict[str, float]:
        nats = sum(float(output["nats"]) for output in batches) / len(batches)
        return {heldout.name: bits_per_byte(nats * num_tokens / num_bytes)}

    def decode(tokens: np.ndarray) -> str:
        return text.tokenizer.decode(tokens[1:])

    sampler = workload.sampler and replace(workload.sampler, prompt=np.array([END], np.int32), decode=decode)
    return replace(
        workload,
        source=lambda size, seed: source,
        score=score,
        loss=replace(workload.loss, scale=tokens_per_byte / math.log(2)),
        sampler=sampler,
    )
