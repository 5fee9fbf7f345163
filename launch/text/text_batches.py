"""Batches of windows of a tokenized text, a function of seed and step on any mesh and number of processes.

Grain computes the shuffled order on the fly, so any position is available at once and nothing is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sharding.errors import ShardingError

from . import optional_packages
from .token_cache import TokenizedText
from .token_files import Tokens

NUM_HELDOUT_TOKENS = 2**15
"""Tokens per evaluation, always the same ones."""


@dataclass(frozen=True)
class Windows:
    """Windows of tokens [S + 1] that overlap by one, as a random-access source for Grain."""

    tokens: Tokens
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens.windows([number * self.length], self.length + 1)[0]


def shuffled(source: Any, *, seed: int) -> Any:
    """A source's elements by global position; each epoch has every element once, in its own order."""
    import grain

    return grain.MapDataset.source(source).shuffle(seed=seed % 2**32).repeat()


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Batches of tokens [B, S + 1] from a text: inputs and the targets, shifted by one.

    The text is cut into windows of S tokens; every epoch has each window once, in its own order. Each process reads
    only its own rows.
    """

    text: TokenizedText
    batch_size: int
    length: int
    seed: int
    name: str = "text"

    def __post_init__(self) -> None:
        optional_packages.version("grain", "--data")
        splits = {"training": self.text.train, "held-out": self.text.heldout}
        short = [f"{len(tokens)} {name} tokens" for name, tokens in splits.items() if len(tokens) <= self.length]
        if short:
            raise ShardingError(
                f"--data with windows of {self.length} tokens",
                found=short,
                required=f"one window and its last target in each split: {self.length} + 1 tokens",
                fix=["more text", "--tokenizer bytes, for more tokens", "a model with a shorter context"],
            )

    @property
    def description(self) -> str:
        """A readable description of the data."""
        return f"{self.text}, {self.num_windows:,} windows"

    @property
    def sha256(self) -> str:
        """Checksum of text and tokenizer."""
        return self.text.sha256

    @property
    def num_windows(self) -> int:
        """Windows per epoch."""
        return len(Windows(self.text.train, self.length))

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> np.ndarray:
        """Training tokens [B, S + 1] of `step`, or these rows of them."""
        rows = np.arange(self.batch_size) if rows is None else rows
        return np.stack([self._shuffled[int(position)] for position in step * self.batch_size + rows])

    @cached_property
    def _shuffled(self) -> Any:
        return shuffled(Windows(self.text.train, self.length), seed=self.seed)

    def heldout_batches(self) -> Sequence[np.ndarray]:
        """Batches [B, S + 1], always the same, spread evenly over the held-out text."""
        return [self.text.heldout.windows(row, self.length + 1) for row in self._heldout_starts()]

    def heldout_size(self) -> tuple[int, int]:
        """Number of target tokens in all held-out batches, and of the bytes they encode."""
        starts, lengths = self._heldout_starts(), self.text.tokenizer.num_bytes
        targets = (self.text.heldout.windows(row, self.length + 1)[:, 1:] for row in starts)
        return starts.size * self.length, sum(int(lengths[tokens].sum()) for tokens in targets)

    def _heldout_starts(self) -> np.ndarray:
        """Start positions of windows, [batches, B]."""
        num_batches = max(1, NUM_HELDOUT_TOKENS // (self.batch_size * self.length))
        last = len(self.text.heldout) - self.length - 1
        return np.linspace(0, last, num_batches * self.batch_size).astype(np.int64).reshape(num_batches, -1)
