"""Rows of stacks, as the arrays that were stacked.

An unrolled `scan` stacks what its backward pass reads, which slices it again. Without the stack nothing is stored
twice, and what the backward pass gathers is equal to what the forward pass gathered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from .. import compat
from .equations import SIDE_BY_SIDE, dim_of_parts, traced

RESHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})
"""Primitives that may only add or remove dims of size 1."""


class StackedRows:
    """What is known of the stacks of a list of equations, and of arrays with dims of size 1."""

    def __init__(self) -> None:
        self.makers: dict[Any, Any] = {}
        """Variable -> the equation that stacks arrays, slices one or changes its dims of size 1."""
        self._rows: set[Any] = set()
        """What slices cut out of stacks, with a dim of size 1."""

    def add(self, eqn: Any) -> None:
        """Takes in an equation, in order."""
        if _is_stack(eqn) or _is_slice(eqn) or _only_reshapes(eqn):
            self.makers[eqn.outvars[0]] = eqn

    def simpler(self, eqn: Any) -> Any:
        """A row of a `stack`, with a dim of size 1, as the array with that dim; any other equation as it is."""
        row, stack = self._row(eqn)
        if row is None or stack.primitive.name != "stack":
            return eqn
        self._rows.update(eqn.outvars)
        return traced(eqn, partial(jax.lax.expand_dims, dimensions=(dim_of_parts(stack),)), [row], eqn.outvars)

    def passed_on(self, eqn: Any) -> Any:
        """The variable that an equation returns as it is, a row of a stack or what is sliced whole; else None."""
        source = self._row(eqn)[0]
        if source is not None:
            self._rows.add(source)
        elif _is_slice(eqn):
            source = eqn.invars[0]
        elif _only_reshapes(eqn) and eqn.invars[0] in self._rows:
            before = self.makers.get(eqn.invars[0])
            source = before.invars[0] if before is not None and _only_reshapes(before) else None
        return source if source is not None and source.aval == eqn.outvars[0].aval else None

    def _row(self, eqn: Any) -> tuple[Any, Any]:
        """The array that a slice cuts out of a stack whole, and the equation that stacks it; else (None, None)."""
        stack = self.makers.get(eqn.invars[0]) if _is_slice(eqn) else None
        if stack is None or not _is_stack(stack):
            return None, None
        dim, shape = dim_of_parts(stack), [*stack.outvars[0].aval.shape]
        shape[dim] = 1
        row = stack.invars[eqn.params["start_indices"][dim]]
        is_whole = eqn.outvars[0].aval.shape == tuple(shape) and not compat.is_literal(row)
        return (row, stack) if is_whole else (None, None)


def _is_stack(eqn: Any) -> bool:
    """Whether an equation puts single rows side by side."""
    if eqn.primitive.name not in SIDE_BY_SIDE:
        return False
    return eqn.outvars[0].aval.shape[dim_of_parts(eqn)] == len(eqn.invars)


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
