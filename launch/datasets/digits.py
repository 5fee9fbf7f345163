"""Handwritten digits bundled with scikit-learn: 1,797 grayscale images of 8x8 pixels."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sharding.errors import ShardingError

from ...models.image_classifier import Labelled

SIZE, NUM_CLASSES = 8, 10
NUM_HELDOUT = 360


@dataclass(frozen=True, kw_only=True, eq=False)
class Digits:
    """Batches of images [B, 8, 8, 1] from -1 to 1 and labels [B]; a training epoch has each image once."""

    train: Labelled
    heldout: Labelled
    sha256: str
    batch_size: int
    seed: int
    name: str = "data"

    @property
    def description(self) -> str:
        return (
            f"digits of scikit-learn: {len(self.train.labels):,} training images, {len(self.heldout.labels)} held out, "
            f"{SIZE}x{SIZE} pixels, sha256 {self.sha256[:16]}"
        )

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> Labelled:
        # Batches are consecutive pieces of the concatenated epochs, each epoch in its own order.
        count = len(self.train.labels)
        flat = step * self.batch_size + (np.arange(self.batch_size) if rows is None else rows)
        epochs = {epoch: self._order(epoch) for epoch in np.unique(flat // count).tolist()}
        return _rows(self.train, np.array([epochs[index // count][index % count] for index in flat.tolist()]))

    def heldout_batches(self) -> Sequence[Labelled]:
        count, size = len(self.heldout.labels), self.batch_size
        return [_padded(_rows(self.heldout, np.arange(i, min(i + size, count))), size) for i in range(0, count, size)]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.train.labels))


def read(*, batch_size: int, seed: int) -> Digits:
    """The digits, always with the same held-out images.

    Raises:
        ShardingError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ShardingError(
            "read the digits of scikit-learn",
            found="scikit-learn is not installed",
            required="scikit-learn, which bundles the images",
            fix="pip install 'sharding-jax[data]'",
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 8 - 1).astype(np.float32).reshape(-1, SIZE, SIZE, 1)
    dataset = Labelled(images, labels.astype(np.int32))
    order = np.random.default_rng(0).permutation(len(labels))
    return Digits(
        train=_rows(dataset, order[NUM_HELDOUT:]),
        heldout=_rows(dataset, order[:NUM_HELDOUT]),
        sha256=hashlib.sha256(images.tobytes() + labels.astype(np.int32).tobytes()).hexdigest(),
        batch_size=batch_size,
        seed=seed,
    )


def _rows(data: Labelled, rows: np.ndarray) -> Labelled:
    return Labelled(data.images[rows], data.labels[rows])


def _padded(data: Labelled, size: int) -> Labelled:
    """`data` padded to `size` with blank images of label -1, which metrics ignore."""
    images, labels = data.images, data.labels
    missing = size - len(labels)
    blank = np.zeros((missing, *images.shape[1:]), images.dtype)
    return Labelled(np.concatenate([images, blank]), np.concatenate([labels, np.full(missing, -1, labels.dtype)]))
