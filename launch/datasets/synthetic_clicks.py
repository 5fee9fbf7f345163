"""Synthetic clicks from a known model: unlimited examples, and a known best achievable loss.

An example has independent normal numbers and one category per table; low categories are common, high ones rare. The log
odds of a click are linear in the numbers, plus a value per category and the dot products of the categories' vectors.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...models.dlrm import Clicks
from ..batch_rows import select_rows

NUM_HELDOUT = 2**14
MAX_DISTINCT = 1000
"""Tables with more rows than this repeat their values."""
VECTOR = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class ClickModel:
    """The model that generates clicks; a function of the number of numbers and the tables."""

    tables: tuple[int, ...]
    weights: np.ndarray
    """[numbers]"""
    values: tuple[np.ndarray, ...]
    """One [rows] for each table."""
    vectors: tuple[np.ndarray, ...]
    """One [rows, 4] for each table."""

    def logits(self, numbers: np.ndarray, categories: np.ndarray) -> np.ndarray:
        """The log odds of a click per example, [B]."""
        logits = numbers @ self.weights - 1.0
        total = np.zeros((len(categories), VECTOR))
        for kind, (values, vectors) in enumerate(zip(self.values, self.vectors, strict=True)):
            rows = categories[:, kind] % len(values)
            logits = logits + values[rows]
            # Sum over pairs: half of the square of the sum minus the sum of squares.
            logits = logits - np.sum(vectors[rows] ** 2, axis=1) / 2
            total = total + vectors[rows]
        return logits + np.sum(total**2, axis=1) / 2

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Clicks, np.ndarray]:
        """`count` examples and their true logits."""
        numbers = generator.standard_normal((count, len(self.weights)))
        shares = generator.random((count, len(self.tables))) ** 3
        categories = np.floor(shares * np.array(self.tables)).astype(np.int32)
        logits = self.logits(numbers, categories)
        clicked = (generator.random(count) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        clicks = Clicks(numbers.astype(np.float32), categories, clicked)
        return clicks, logits


def click_model(*, numbers: int, tables: tuple[int, ...]) -> ClickModel:
    """The click model for examples of this form."""
    generator = np.random.default_rng(0)
    rows = [min(count, MAX_DISTINCT) for count in tables]
    return ClickModel(
        tables=tables,
        weights=generator.standard_normal(numbers) * 0.8 / np.sqrt(numbers),
        values=tuple(generator.standard_normal(count) * 1.2 / np.sqrt(len(tables)) for count in rows),
        vectors=tuple(generator.standard_normal((count, VECTOR)) * 0.8 / np.sqrt(len(tables)) for count in rows),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticClicks:
    """Batches drawn from a click model, and that model's own loss on the held-out examples."""

    model: ClickModel
    heldout: Clicks
    best_nats: float
    best_auc: float
    sha256: str
    batch_size: int
    seed: int
    name: str = "data"

    @property
    def description(self) -> str:
        return (
            f"synthetic clicks: {len(self.model.weights)} numbers, {len(self.model.tables)} tables; "
            f"best possible {self.best_nats:.4f} nats per click, AUC {self.best_auc:.4f}"
        )

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> Clicks:
        # The third number separates this random stream from that of the held-out examples, whatever the seed.
        return select_rows(self.model.draw(np.random.default_rng((self.seed, step, 1)), self.batch_size)[0], rows)

    def heldout_batches(self) -> Sequence[Clicks]:
        parts = (self.heldout.numbers, self.heldout.categories, self.heldout.clicked)
        starts = range(0, max(1, NUM_HELDOUT // self.batch_size) * self.batch_size, self.batch_size)
        return [Clicks(*(part[start : start + self.batch_size] for part in parts)) for start in starts]


def make(*, numbers: int, tables: tuple[int, ...], batch_size: int, seed: int) -> SyntheticClicks:
    """Synthetic clicks for examples of this form; the held-out ones depend on the form alone."""
    model = click_model(numbers=numbers, tables=tables)
    heldout, logits = model.draw(np.random.default_rng(0), max(NUM_HELDOUT, batch_size))
    clicked = heldout.clicked
    digest = hashlib.sha256(b"".join(array.tobytes() for array in (model.weights, *model.values, *model.vectors)))
    digest.update(clicked.tobytes())
    return SyntheticClicks(
        model=model,
        heldout=heldout,
        best_nats=log_loss(logits, clicked),
        best_auc=auc(logits, clicked),
        sha256=digest.hexdigest(),
        batch_size=batch_size,
        seed=seed,
    )


def log_loss(logits: np.ndarray, clicked: np.ndarray) -> float:
    """Mean binary cross entropy in nats."""
    logits = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, logits) - clicked * logits))


def auc(logits: np.ndarray, clicked: np.ndarray) -> float:
    """Area under the ROC curve: how often a clicked example has a higher logit than another; ties count half."""
    from scipy.stats import rankdata

    is_click = clicked > 0.5
    num_clicks = int(is_click.sum())
    above = rankdata(logits)[is_click].sum() - num_clicks * (num_clicks + 1) / 2
    return float(above / (num_clicks * (len(clicked) - num_clicks)))
