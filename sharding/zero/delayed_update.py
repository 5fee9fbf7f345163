"""ZeRO-Offload's delayed parameter update: a step applies the gradient of the step before it.

Then no part of an update depends on the step's own gradient, and it may run, and its arrays may travel, while that is
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Delayed(NamedTuple):
    """Optimizer state of a delayed update."""

    steps: jax.Array
    """Steps taken so far, int32."""
    pending: Any
    """The gradients of the last step, like the parameters."""
    inner: Any
    """The optimizer's state, or a ``Master``."""


Update = Callable[[Any, Any], tuple[Any, Any]]
"""gradients, state -> new parameters or updates, and the next state."""


def delayed(update: Update, after: int, gradients: Any, state: Delayed, unchanged: Any) -> tuple[Any, Delayed]:
    """What `update` gives of the last step's gradients, and of this step's during the first `after` steps.

    The step behind these changes nothing, as its gradient waits for the next one.

    Args:
        update: the update that is delayed.
        after: steps of warm-up.
        gradients: of this step.
        state: before this step.
        unchanged: the first result of `update` if it changes nothing.
    """
    used = state.pending if after == 0 else select(state.steps < after, gradients, state.pending)
    new, inner = update(used, state.inner)
    new, inner = select(state.steps != after, (new, inner), (unchanged, state.inner))
    pending = jax.tree.map(lambda old, gradient: gradient.astype(old.dtype), state.pending, gradients)
    return new, Delayed(state.steps + 1, pending, inner)


def select(condition: jax.Array, these: Any, those: Any) -> Any:
    """The arrays of `these` where the scalar condition holds, else of `those`."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), these, those)
