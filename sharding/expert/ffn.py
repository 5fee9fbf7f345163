"""Expert feed-forward weights: two matrices per expert and the activation between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax


class Experts(NamedTuple):
    """Stacked experts x_M -> activation(x_M up_MF) down_FM."""

    up: jax.Array
    """[E, M, F]."""
    down: jax.Array
    """[E, F, M]."""
    activation: Callable[[jax.Array], jax.Array]
    implementation: str = "auto"
    """Of the grouped matmuls of dropless experts."""
