"""Where devices don't do the same at the same time, so that what all of them must take part in can't be done.

XLA:CPU's collective-permute waits for all devices of the program, also for those that it neither sends to nor receives
from; in a loop or branch that some devices skip it waits for ever. What is traced there has to know.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

import jax

_AXES: Any = jax.make_user_context(())  # in the cache key of every trace


def differing(*axes: str) -> AbstractContextManager[object]:
    """A block in which a program is traced that devices along these axes run at times of their own."""
    return _AXES((*differs(), *axes))


def differs() -> tuple[str, ...]:
    """The axes of all blocks around."""
    return _AXES.value


def rounds(times: int, of: int) -> AbstractContextManager[object]:
    """A block for one loop whose number of rounds no text of the program says, as devices differ in it.

    Args:
        times: how often its body runs, on the device where it runs most, ...
        of: ... when the loop itself is begun so often.
    """
    return jax.named_scope(f"rounds_{times}_of_{of}")


_ROUNDS = re.compile(r"\brounds_(\d+)_of_(\d+)$")


def rounds_of(scope: str) -> Fraction | None:
    """How often the body of a loop in this scope runs each time that it is begun; None where nobody says."""
    found = _ROUNDS.search(scope)
    return Fraction(int(found[1]), int(found[2])) if found else None
