"""Clicks made up by a hidden model: as many as one likes, and the best that any model can do on them is known.

An example has numbers, independent and normal, and one category of each kind, where low ones are common and high ones
rare. The hidden model adds a weight for each number, a value for each category, and products of two categories'
vectors; a click is drawn with the probability that comes of it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..models.dlrm import Clicks
from .rows import taken

NUM_HELDOUT = 2**14
MOST_DIFFERENT = 1000
"""Kinds with more categories than this repeat their values."""
VECTOR = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Hidden:
    """What decides how likely a click is; always the same for the same numbers and tables."""

    tables: tuple[int, ...]
    weights: np.ndarray
    """[numbers]"""
    values: tuple[np.ndarray, ...]
    """One [rows] for each table."""
    vectors: tuple[np.ndarray, ...]
    """One [rows, 4] for each table."""

    def logits(self, numbers: np.ndarray, categories: np.ndarray) -> np.ndarray:
        """How likely each example is clicked, [B], as log odds."""
        logits = numbers @ self.weights - 1.0
        total = np.zeros((len(categories), VECTOR))
        for kind, (values, vectors) in enumerate(zip(self.values, self.vectors, strict=True)):
            rows = categories[:, kind] % len(values)
            logits = logits + values[rows]
            # The sum over pairs of products, as half of what the square of the sum has more than the squares.
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


def hidden(*, numbers: int, tables: tuple[int, ...]) -> Hidden:
    """The hidden model for examples of this form."""
    generator = np.random.default_rng(0)
    rows = [min(count, MOST_DIFFERENT) for count in tables]
    return Hidden(
        tables=tables,
        weights=generator.standard_normal(numbers) * 0.8 / np.sqrt(numbers),
        values=tuple(generator.standard_normal(count) * 1.2 / np.sqrt(len(tables)) for count in rows),
        vectors=tuple(generator.standard_normal((count, VECTOR)) * 0.8 / np.sqrt(len(tables)) for count in rows),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class HiddenClicks:
    """Batches drawn from a hidden model, and how well it does itself on the examples held out."""

    hidden: Hidden
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
            f"clicks drawn from a hidden model: {len(self.hidden.weights)} numbers, {len(self.hidden.tables)} tables; "
            f"the best possible is {self.best_nats:.4f} nats per click, AUC {self.best_auc:.4f}"
        )

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> Clicks:
        # The third number keeps these apart from the examples held out, whatever the seed.
        return taken(self.hidden.draw(np.random.default_rng((self.seed, step, 1)), self.batch_size)[0], rows)

    def heldout_batches(self) -> Sequence[Clicks]:
        parts = (self.heldout.numbers, self.heldout.categories, self.heldout.clicked)
        starts = range(0, max(1, NUM_HELDOUT // self.batch_size) * self.batch_size, self.batch_size)
        return [Clicks(*(part[start : start + self.batch_size] for part in parts)) for start in starts]


def make(*, numbers: int, tables: tuple[int, ...], batch_size: int, seed: int) -> HiddenClicks:
    """Clicks of the hidden model for examples of this form; what is held out depends on the form alone."""
    model = hidden(numbers=numbers, tables=tables)
    heldout, logits = model.draw(np.random.default_rng(0), max(NUM_HELDOUT, batch_size))
    clicked = heldout.clicked
    digest = hashlib.sha256(b"".join(array.tobytes() for array in (model.weights, *model.values, *model.vectors)))
    digest.update(clicked.tobytes())
    return HiddenClicks(
        hidden=model,
        heldout=heldout,
        best_nats=log_loss(logits, clicked),
        best_auc=auc(logits, clicked),
        sha256=digest.hexdigest(),
        batch_size=batch_size,
        seed=seed,
    )


def log_loss(logits: np.ndarray, clicked: np.ndarray) -> float:
    """Mean nats of a click or its absence."""
    logits = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, logits) - clicked * logits))


def auc(logits: np.ndarray, clicked: np.ndarray) -> float:
    """How often an example that was clicked has the higher logit of two, equal ones counting half."""
    from scipy.stats import rankdata

    is_click = clicked > 0.5
    num_clicks = int(is_click.sum())
    above = rankdata(logits)[is_click].sum() - num_clicks * (num_clicks + 1) / 2
    return float(above / (num_clicks * (len(clicked) - num_clicks)))
