"""Contexts for tracing divergent control flow: code that some devices run more often than others, or skip.

XLA:CPU's collective-permute waits for all devices of the program, even those outside its source-target pairs, and
deadlocks in a loop or branch that some devices skip. Code traced there must avoid it.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

import jax

_AXES: Any = jax.make_user_context(())  # in the cache key of every trace


def divergent_over(*axes: str) -> AbstractContextManager[object]:
    """A context for tracing code whose control flow differs between devices along these axes."""
    return _AXES((*divergent_axes(), *axes))


def divergent_axes() -> tuple[str, ...]:
    """The axes of all enclosing contexts."""
    return _AXES.value


def declare_trip_count(times: int, of: int) -> AbstractContextManager[object]:
    """A context that states the trip count of one loop, which HLO does not contain as devices differ in it.

    Args:
        times: how often its body runs in total, on the device where it runs most, ...
        of: ... if the loop is entered this often.
    """
    return jax.named_scope(f"rounds_{times}_of_{of}")


_TRIP_COUNT = re.compile(r"\brounds_(\d+)_of_(\d+)$")


def declared_trip_count(scope: str) -> Fraction | None:
    """The mean trip count of a loop with this scope, or None if not stated."""
    found = _TRIP_COUNT.search(scope)
    return Fraction(int(found[1]), int(found[2])) if found else None
