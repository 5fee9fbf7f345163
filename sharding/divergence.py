"""Where devices don't do the same at the same time, so that what all of them must take part in can't be done.

XLA:CPU's collective-permute waits for all devices of the program, also for those that it neither sends to nor receives
from; in a loop or branch that some devices skip it waits for ever. What is traced there has to know.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax

_AXES: Any = jax.make_user_context(())  # in the cache key of every trace


def differing(*axes: str) -> AbstractContextManager[object]:
    """A block in which a program is traced that devices along these axes run at times of their own."""
    return _AXES((*differs(), *axes))


def differs() -> tuple[str, ...]:
    """The axes of all blocks around."""
    return _AXES.value
