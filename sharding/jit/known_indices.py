"""What is known of arrays of indices while tracing: that all elements are one constant, or count along a dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import compat

Counters = tuple[int | None, ...]
"""The dims that the columns of an array, its parts along the last dim, count along: 0, 1, 2, ...

A single entry is of all columns.
"""

Index = int | Counters
"""What is known of an array of integers or booleans: the value of all elements, or what it counts."""

Known = Mapping[Any, Index]
"""Variable -> what is known of it."""

PASSED = frozenset({"broadcast_in_dim", "copy", "reshape", "squeeze"})
FOLDED: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "not": np.invert,
    "or": np.bitwise_or,
    "sub": np.subtract,
}
"""What is computed with constants: predicates, and what JAX wraps negative indices with."""

OF_EQUALS: Mapping[str, int] = {"eq": 1, "ge": 1, "gt": 0, "le": 1, "lt": 0, "ne": 0, "sub": 0, "xor": 0}
"""Primitive -> its result for two equal integers."""

MOST_COLUMNS = 16
"""Most columns of an array that have an entry each."""

MOST_ELEMENTS = 1 << 16
"""Most elements of a constant array that is looked at."""


def of_atom(atom: Any, known: Known) -> Index | None:
    """What is known of an atom."""
    if not _is_index(atom.aval):
        return None
    if not compat.is_literal(atom):
        return known.get(atom)
    return int(np.asarray(atom.val).item()) if not atom.aval.shape else None


def of_constant(x: Any) -> Index | None:
    """What is known of the value of a constant that a program closes over."""
    is_small = not isinstance(x, compat.Tracer) and 1 < getattr(x, "size", 0) <= MOST_ELEMENTS
    if not is_small or not getattr(x, "is_fully_addressable", True) or not _is_index(jax.typeof(x)):
        return None
    elements = np.asarray(x)
    if (elements == elements.flat[0]).all():
        return int(elements.flat[0])
    counts = elements.ndim == 1 and np.array_equal(elements, np.arange(elements.size))
    return (0,) if counts else None


def constant(atom: Any, known: Known) -> int | None:
    """The value of all elements of an atom, if it is known."""
    found = of_atom(atom, known)
    return found if isinstance(found, int) else None


def of_result(eqn: Any, known: Known) -> Index | None:
    """What is known of the only result of an equation, if it is an index."""
    if len(eqn.outvars) != 1 or not _is_index(eqn.outvars[0].aval):
        return None
    operands = [of_atom(v, known) for v in eqn.invars]
    if eqn.primitive.name == "select_n" and isinstance(operands[0], int):
        return operands[1 + operands[0]]
    if operands and all(isinstance(x, int) for x in operands):
        return _folded(eqn, operands)
    if eqn.primitive.name in OF_EQUALS and eqn.invars[0] is eqn.invars[1] and _is_index(eqn.invars[0].aval):
        return OF_EQUALS[eqn.primitive.name]
    if eqn.primitive.name == "and" and 0 in operands:
        return 0
    if eqn.primitive.name == "or" and eqn.outvars[0].aval.dtype == bool and 1 in operands:
        return 1
    if eqn.primitive.name == "lt" and isinstance(operands[0], tuple) and None not in operands[0] and operands[1] == 0:
        return 0
    return _counters(eqn, operands)


def of_stack(row: Index | None) -> Index | None:
    """What is known of a stack of equal arrays, along a new first dim."""
    return tuple(None if d is None else d + 1 for d in row) if isinstance(row, tuple) else row


def of_row(stack: Index | None) -> Index | None:
    """What is known of each row of an array."""
    return tuple(d - 1 if d else None for d in stack) if isinstance(stack, tuple) else stack


def _is_index(aval: Any) -> bool:
    """Whether an abstract value is of integers or booleans."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and not compat.is_extended(dtype) and np.dtype(dtype).kind in "iub"


def _folded(eqn: Any, values: Sequence[Any]) -> int | None:
    """The value of a result that is computed from constants."""
    name = eqn.primitive.name
    operands = [np.asarray(x, v.aval.dtype) for x, v in zip(values, eqn.invars, strict=True)]
    if name in PASSED:
        return int(operands[0])
    if name == "convert_element_type":
        return int(operands[0].astype(eqn.params["new_dtype"]))
    return int(FOLDED[name](*operands)) if name in FOLDED else None


def _counters(eqn: Any, operands: Sequence[Index | None]) -> Counters | None:
    """The dims that a result counts along."""
    name, params, (result,) = eqn.primitive.name, eqn.params, eqn.outvars
    shape = result.aval.shape
    if name == "iota":
        return (params["dimension"],) if _holds(result.aval.dtype, shape[params["dimension"]]) else None
    if name == "concatenate":
        return _concatenated(eqn, operands) if params["dimension"] == len(shape) - 1 else None
    found = operands[0] if operands else None
    if not isinstance(found, tuple):
        return None
    source = eqn.invars[0].aval.shape
    if name == "convert_element_type":
        return found if _holds(params["new_dtype"], max(source, default=0)) else None
    if name == "broadcast_in_dim":
        to = {d: new for d, new in enumerate(params["broadcast_dimensions"]) if source[d] == shape[new]}
    elif name in ("reshape", "squeeze"):
        to = _kept_dims(source, shape) if params.get("dimensions") is None or name == "squeeze" else {}
    elif name == "transpose":
        to = {d: new for new, d in enumerate(params["permutation"])}
    else:
        return None
    if len(found) > 1 and to.get(len(source) - 1) != len(shape) - 1:
        return None
    moved = tuple(None if d is None else to.get(d) for d in found)
    return moved if any(d is not None for d in moved) else None


def _holds(dtype: Any, size: int) -> bool:
    """Whether a dtype has all integers below `size`."""
    return np.dtype(dtype).kind in "iu" and size - 1 <= np.iinfo(dtype).max


def _concatenated(eqn: Any, operands: Sequence[Index | None]) -> Counters | None:
    """The dims that the columns of arrays side by side count along."""
    columns: list[int | None] = []
    last = len(eqn.outvars[0].aval.shape) - 1
    for v, found in zip(eqn.invars, operands, strict=True):
        n = v.aval.shape[-1]
        if len(columns) + n > MOST_COLUMNS:
            return None
        one = found if isinstance(found, tuple) and last not in found else (None,)
        columns += one * n if len(one) == 1 else one
    return tuple(columns) if any(d is not None for d in columns) else None


def _kept_dims(source: Sequence[int], shape: Sequence[int]) -> dict[int, int]:
    """Dim of an array -> dim of its reshaped form along which the same elements lie."""
    starts = {(math.prod(shape[:d]), n): d for d, n in enumerate(shape) if n > 1}
    found = {d: starts.get((math.prod(source[:d]), n)) for d, n in enumerate(source)}
    return {d: new for d, new in found.items() if new is not None}
