"""Batches of windows of a tokenized text: a function of seed and step alone, whatever the mesh and the processes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sharding.errors import ShardingError

from .cache import TokenizedText
from .order import shuffled

NUM_HELDOUT_TOKENS = 2**15
"""Looked at by every evaluation, always the same ones."""


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
        return (len(self.text.train) - 1) // self.length

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> np.ndarray:
        """Tokens [B, S + 1] to train on at `step`, or these rows of them."""
        rows = np.arange(self.batch_size) if rows is None else rows
        windows = shuffled(step * self.batch_size + rows, count=self.num_windows, seed=self.seed)
        return self.text.train.windows(windows * self.length, self.length + 1)

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
