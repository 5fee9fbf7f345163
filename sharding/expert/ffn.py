"""The experts: two matrices each, and what is between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax


class Experts(NamedTuple):
    """x_M -> activation(x_M up_MF) down_FM of each expert, stacked."""

    up: jax.Array
    """[E, M, F]."""
    down: jax.Array
    """[E, F, M]."""
    activation: Callable[[jax.Array], jax.Array]
