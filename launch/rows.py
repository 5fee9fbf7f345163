"""A batch in parts: as each device can cut it, and as processes share it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sharding


def taken(batch: Any, rows: np.ndarray | None) -> Any:
    """These rows of a batch of numpy arrays [B, ...]; None takes all."""
    return batch if rows is None else jax.tree.map(lambda leaf: leaf[rows], batch)


def microbatches(rows: jax.Array, parts: int) -> jax.Array:
    """[B, ...] as [parts, B / parts, ...]; every `parts`-th row is in the same microbatch.

    So each device cuts the rows that it has, and the split of the batch stays: rows one behind the other would have to
    move.
    """
    cut = rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:])
    return sharding.annotate(jnp.moveaxis(cut, 1, 0), name="microbatches")
