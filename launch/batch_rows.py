"""Rows of a batch: those of one process, and those of each microbatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sharding


def select_rows(batch: Any, rows: np.ndarray | None) -> Any:
    """These rows of a batch of numpy arrays [B, ...]; None selects all."""
    return batch if rows is None else jax.tree.map(lambda leaf: leaf[rows], batch)


def microbatches(rows: jax.Array, parts: int) -> jax.Array:
    """[B, ...] as [parts, B / parts, ...]; every `parts`-th row is in the same microbatch.

    Each device slices the rows it holds, so the batch keeps its sharding; contiguous microbatches would need a reshard.
    """
    strided = rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:])
    return sharding.annotate(jnp.moveaxis(strided, 1, 0), name="microbatches")
