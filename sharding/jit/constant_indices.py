"""Gathers and scatters of whole arrays, at indices that are known while tracing, as reshapes.

`jnp.take(x, 0, axis)` along a dim of size 1 gathers all of `x`, and its transpose scatters all of it into zeros.
Compilers for accelerators find that out after partitioning, when the collectives are there already. A remainder of a
division by 1 is 0, whatever is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..graph import CALLS

Known = Mapping[Any, int]
"""Variable of integers or booleans that are all equal -> their value."""

Indices = tuple[int | None, ...]
"""The values of inputs or outputs; None for those that aren't known."""

PASSED = frozenset({"broadcast_in_dim", "reshape", "squeeze"})
FOLDED: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "eq": np.equal,
    "ge": np.greater_equal,
    "lt": np.less,
    "ne": np.not_equal,
    "sub": np.subtract,
}
"""What JAX wraps negative indices with, beside `select_n` and conversions."""

GIVEN_OPERANDS = frozenset({"closed_call", "core_call", "eval_jaxpr", "jit", "pjit"})
"""Calls whose body has their operands as inputs."""


def without_constant_indices(jaxpr: Any) -> Any:
    """The jaxpr, which computes the same, without gathers and scatters of whole arrays; itself if it has none."""
    return _Pass().jaxpr(jaxpr, ())[0]


class _Pass:
    def __init__(self) -> None:
        self.done: dict[tuple[int, Indices], tuple[Any, Any, Indices]] = {}
        """Id of a jaxpr and its known inputs -> the jaxpr, which keeps the id valid, its result and known outputs."""

    def jaxpr(self, jaxpr: Any, inputs: Indices) -> tuple[Any, Indices]:
        key = (id(jaxpr), inputs)
        if key not in self.done:
            self.done[key] = (jaxpr, *self.rewritten(jaxpr, inputs))
        return self.done[key][1:]

    def rewritten(self, jaxpr: Any, inputs: Indices) -> tuple[Any, Indices]:
        source = compat.open_jaxpr(jaxpr)
        known = {v: x for v, x in zip(source.invars, inputs, strict=False) if x is not None}
        zeros: set[Any] = set()
        eqns: list[Any] = []
        literals: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom if compat.is_literal(atom) else literals.get(atom, atom)

        for eqn in source.eqns:
            if any(read(v) is not v for v in eqn.invars):
                eqn = eqn.replace(invars=[read(v) for v in eqn.invars])
            if eqn.primitive.name == "rem" and _value(eqn.invars[1], known) == 1:
                if not eqn.outvars[0].aval.shape:
                    known[eqn.outvars[0]], literals[eqn.outvars[0]] = 0, compat.new_literal(0, eqn.outvars[0].aval)
                    continue
                eqn = _zeros(eqn)
            eqns.append(_reshaped(self.with_bodies(eqn, known), known, zeros))
            if (index := _folded(eqn, known)) is not None:
                known[eqn.outvars[0]] = index
            if _is_zero_array(eqn):
                zeros.update(eqn.outvars)
        outputs = tuple(_value(v, known) for v in source.outvars)
        if not literals and all(new is old for new, old in zip(eqns, source.eqns, strict=True)):
            return jaxpr, outputs
        return compat.rebuild(jaxpr, eqns=eqns, outvars=[*map(read, source.outvars)]), outputs

    def with_bodies(self, eqn: Any, known: dict[Any, int]) -> Any:
        """An equation with rewritten bodies; adds what is known of its results."""
        name, params = eqn.primitive.name, eqn.params
        if name not in CALLS and name not in ("cond", "scan", "shard_map", "while"):
            return eqn
        given = tuple(_value(v, known) for v in eqn.invars) if name in GIVEN_OPERANDS else ()
        for key, position, body in compat.sub_jaxprs(params):
            new, outputs = self.jaxpr(body, given)
            if new is not body:
                params = compat.with_jaxpr(params, key, position, new)
            if name in GIVEN_OPERANDS:
                known.update((v, x) for v, x in zip(eqn.outvars, outputs, strict=True) if x is not None)
        return eqn if params is eqn.params else eqn.replace(params=params)


def _value(atom: Any, known: Known) -> int | None:
    if not _is_index(atom):
        return None
    if not compat.is_literal(atom):
        return known.get(atom)
    return int(np.asarray(atom.val).item()) if not atom.aval.shape else None


def _is_index(atom: Any) -> bool:
    """Whether an atom is integers or booleans."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and not compat.is_extended(dtype) and np.dtype(dtype).kind in "iub"


def _folded(eqn: Any, known: Known) -> int | None:
    """The value of an equation's result, if it is an index that is computed from known ones."""
    name = eqn.primitive.name
    if len(eqn.outvars) != 1 or not _is_index(eqn.outvars[0]):
        return None
    values = [_value(v, known) for v in eqn.invars]
    operands = [np.asarray(x, v.aval.dtype) for x, v in zip(values, eqn.invars, strict=True) if x is not None]
    if len(operands) < len(values) or not operands:
        return None
    if name in PASSED:
        return int(operands[0])
    if name == "convert_element_type":
        return int(operands[0].astype(eqn.params["new_dtype"]))
    if name == "select_n":
        return int(operands[1 + int(operands[0])])
    return int(FOLDED[name](*operands)) if name in FOLDED else None


def _reshaped(eqn: Any, known: Known, zeros: Collection[Any]) -> Any:
    """A gather of a whole array, or a scatter of one into zeros, as a reshape; any other equation as it is."""
    name = eqn.primitive.name
    if name not in ("gather", "scatter-add") or _value(eqn.invars[1], known) != 0:
        return eqn
    operand, (result,) = eqn.invars[0], eqn.outvars
    if name == "gather":
        source, is_whole = operand, tuple(eqn.params["slice_sizes"]) == operand.aval.shape
    else:
        source = eqn.invars[2]
        is_whole = not compat.is_literal(operand) and operand in zeros
    shape = result.aval.shape
    if compat.is_literal(source) or not is_whole or math.prod(shape) != math.prod(source.aval.shape):
        return eqn
    if shape == source.aval.shape:
        return eqn
    (new,) = compat.open_jaxpr(jax.make_jaxpr(lambda x: jnp.reshape(x, shape))(source.aval)).eqns
    return compat.new_eqn(eqn, [source], [result], new.primitive, new.params)


def _zeros(eqn: Any) -> Any:
    """An equation whose result is an array of zeros instead."""
    (result,) = eqn.outvars
    (new,) = compat.open_jaxpr(jax.make_jaxpr(lambda: jnp.zeros(result.aval.shape, result.aval.dtype))()).eqns
    return compat.new_eqn(eqn, new.invars, [result], new.primitive, new.params)


def _is_zero_array(eqn: Any) -> bool:
    """Whether an equation broadcasts a zero."""
    operand = eqn.invars[0] if eqn.primitive.name == "broadcast_in_dim" else None
    return operand is not None and compat.is_literal(operand) and not operand.aval.shape and not operand.val
