"""Slices of arrays that were put side by side, as the arrays that they cut out again.

An unrolled `scan` stacks what its backward pass reads, which slices it again. Without the stack nothing is stored
twice, and what the backward pass gathers is equal to what the forward pass gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from .. import compat
from .equations import SIDE_BY_SIDE, dim_of_parts, traced

RESHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})
"""Primitives that may only add or remove dims of size 1."""


class SlicedParts:
    """What is known of the arrays of a list of equations that are read in parts."""

    def __init__(self) -> None:
        self._makers: dict[Any, Any] = {}
        """Variable -> the equation that puts arrays side by side, slices one or changes its dims of size 1."""

    def add(self, eqn: Any) -> None:
        """Takes in an equation, in order."""
        if eqn.primitive.name in SIDE_BY_SIDE or _is_slice(eqn) or _only_reshapes(eqn):
            self._makers[eqn.outvars[0]] = eqn

    def simpler(self, eqn: Any) -> Any:
        """A slice of one of several arrays side by side as that of the array; any other equation as it is."""
        while _is_slice(eqn) and (found := self._within_a_part(eqn)) is not None:
            eqn = found
        return eqn

    def passed_on(self, eqn: Any) -> Any:
        """The variable that an equation returns as it is, sliced whole or reshaped twice; else None."""
        source = eqn if _is_slice(eqn) else None
        if _only_reshapes(eqn):
            before = self._makers.get(eqn.invars[0])
            source = before if before is not None and _only_reshapes(before) else None
        return source.invars[0] if source is not None and source.invars[0].aval == eqn.outvars[0].aval else None

    def without_unused(self, eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
        """The equations but those that put side by side, slice or reshape what nothing reads."""
        used = {v for v in outvars if not compat.is_literal(v)}
        found: list[Any] = []
        for eqn in reversed(eqns):
            if eqn.outvars and all(v in self._makers and v not in used for v in eqn.outvars):
                continue
            used.update(v for v in eqn.invars if not compat.is_literal(v))
            found.append(eqn)
        return found[::-1]

    def _within_a_part(self, eqn: Any) -> Any:
        """A slice of arrays side by side as one of the array that it lies in; None for any other."""
        maker = self._makers.get(eqn.invars[0])
        if maker is None or maker.primitive.name not in SIDE_BY_SIDE:
            return None
        dim, is_stack = dim_of_parts(maker), maker.primitive.name == "stack"
        low, high = eqn.params["start_indices"], eqn.params["limit_indices"]
        ends = [*itertools.accumulate(1 if is_stack else v.aval.shape[dim] for v in maker.invars)]
        for part, start, end in zip(maker.invars, (0, *ends), ends, strict=False):
            if start <= low[dim] < high[dim] <= end and not compat.is_literal(part):
                return _of_row(eqn, part, dim) if is_stack else _of_part(eqn, part, dim, start)
        return None


def _of_part(eqn: Any, part: Any, dim: int, start: int) -> Any:
    """A slice of arrays side by side as one of a part that starts at an index of a dim."""
    low, high = ([*eqn.params[name]] for name in ("start_indices", "limit_indices"))
    low[dim], high[dim] = low[dim] - start, high[dim] - start
    return traced(eqn, partial(jax.lax.slice, start_indices=low, limit_indices=high), [part], eqn.outvars)


def _of_row(eqn: Any, row: Any, dim: int) -> Any:
    """A slice of a stack as one of its rows with a new dim; None if it leaves out some of the row."""
    shape = [*row.aval.shape]
    is_whole = eqn.outvars[0].aval.shape == (*shape[:dim], 1, *shape[dim:])
    return traced(eqn, partial(jax.lax.expand_dims, dimensions=(dim,)), [row], eqn.outvars) if is_whole else None


def _is_slice(eqn: Any) -> bool:
    """Whether an equation slices without gaps."""
    if eqn.primitive.name != "slice" or compat.is_literal(eqn.invars[0]):
        return False
    return all(n == 1 for n in eqn.params["strides"] or ())


def _only_reshapes(eqn: Any) -> bool:
    """Whether an equation adds or removes dims of size 1 and does nothing else."""
    if eqn.primitive.name not in RESHAPES or len(eqn.invars) > 1 or compat.is_literal(eqn.invars[0]):
        return False
    before, after = ([n for n in v.aval.shape if n > 1] for v in (eqn.invars[0], eqn.outvars[0]))
    return before == after and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
