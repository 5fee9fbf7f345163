"""Batches of windows of a tokenized text: a function of seed and step alone, whatever the mesh and the processes.

Grain serves the windows: at any position at once, since the order is computed where it is asked for and not stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sharding.errors import ShardingError

from . import extra
from .cache import TokenizedText
from .tokens import Tokens

NUM_HELDOUT_TOKENS = 2**15
"""Looked at by every evaluation, always the same ones."""


@dataclass(frozen=True)
class Windows:
    """Tokens in windows [S + 1] that overlap by one, for Grain to pick from."""

    tokens: Tokens
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens.windows([number * self.length], self.length + 1)[0]


def shuffled(source: Any, *, seed: int) -> Any:
    """A source's elements by position, counted from the first epoch on: each once an epoch, in another order."""
    import grain

    return grain.MapDataset.source(source).shuffle(seed=seed % 2**32).repeat()


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Batches of tokens [B, S + 1] from a text: inputs and, shifted by one, targets.

    The text is cut into windows of S; every epoch sees each of them once, in an order of its own. Rows that are not
    asked for are not read: each process reads its share.
    """

    text: TokenizedText
    batch_size: int
    length: int
    seed: int
    name: str = "text"

    def __post_init__(self) -> None:
        extra.version("grain", "--data")
        sides = {"to train on": self.text.train, "held out": self.text.heldout}
        short = [f"{len(side)} tokens {name}" for name, side in sides.items() if len(side) <= self.length]
        if short:
            raise ShardingError(
                f"--data with windows of {self.length} tokens",
                there=short,
                must=f"each side needs one window and its last target: {self.length} + 1 tokens",
                fix=["more text", "--tokenizer bytes, which makes more tokens of it", "a model of shorter context"],
            )

    @property
    def description(self) -> str:
        """What the data are, for people."""
        return f"{self.text}, {self.num_windows:,} windows"

    @property
    def sha256(self) -> str:
        """Identifies text and tokenizer."""
        return self.text.sha256

    @property
    def num_windows(self) -> int:
        """In an epoch."""
        return len(Windows(self.text.train, self.length))

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> np.ndarray:
        """Tokens [B, S + 1] to train on at `step`, or these rows of them."""
        rows = np.arange(self.batch_size) if rows is None else rows
        return np.stack([self._shuffled[int(position)] for position in step * self.batch_size + rows])

    @cached_property
    def _shuffled(self) -> Any:
        return shuffled(Windows(self.text.train, self.length), seed=self.seed)

    def heldout_batches(self) -> Sequence[np.ndarray]:
        """The same batches [B, S + 1] every time, spread evenly over the held-out text."""
        return [self.text.heldout.windows(row, self.length + 1) for row in self._heldout_starts()]

    def heldout_size(self) -> tuple[int, int]:
        """Tokens that all held-out batches predict, and the bytes that these stand for."""
        starts, lengths = self._heldout_starts(), self.text.tokenizer.num_bytes
        targets = (self.text.heldout.windows(row, self.length + 1)[:, 1:] for row in starts)
        return starts.size * self.length, sum(int(lengths[tokens].sum()) for tokens in targets)

    def _heldout_starts(self) -> np.ndarray:
        """Where windows start, [batches, B]."""
        num_batches = max(1, NUM_HELDOUT_TOKENS // (self.batch_size * self.length))
        last = len(self.text.heldout) - self.length - 1
        return np.linspace(0, last, num_batches * self.batch_size).astype(np.int64).reshape(num_batches, -1)
