"""A `while` that counts from one constant to another, as the `scan` that it is.

`jax.lax.while_loop(lambda c: c[0] < 5, ...)` runs five times. XLA finds that out, too (openxla/xla,
`hlo/analysis/while_loop_analysis.cc`), but what a loop sends in all is to be known before a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from .equal_values import CALLS
from .equations import traced
from .known_indices import PASSED, Known, constant

MOST_TRIPS = 1 << 31
"""Loops of more iterations stay as they are: a `scan` counts in 32 bits."""

SAME = PASSED | {"convert_element_type", "reduce_and", "reduce_or"}
"""Primitives that pass a scalar on."""

COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})


@dataclass(frozen=True)
class Counter:
    """An integer that is `start + k * step` in iteration k of a loop; a constant if the step is 0."""

    start: int
    step: int = 0
    carry: int | None = None
    """The carry whose value is added to it."""


@dataclass(frozen=True)
class Lasting:
    """A condition that holds in the first `trips` iterations, and not in the next one."""

    trips: float


Value = Counter | Lasting | None


def as_scan(eqn: Any, known: Known) -> Any:
    """A `while` of a known number of iterations as a `scan`; any other equation as it is.

    Args:
        eqn: the equation.
        known: what is known of the operands.
    """
    if eqn.primitive.name != "while" or eqn.effects:
        return eqn
    trips = _trips(eqn, known)
    if trips is None or not 0 < trips < MOST_TRIPS:
        return eqn
    operands, num_consts = eqn.invars[eqn.params["cond_nconsts"] :], eqn.params["body_nconsts"]

    def copies(*carry: Any) -> list[Any]:
        return jax.lax.scan(lambda c, _: ([*map(jnp.copy, c)], None), [*carry], length=trips)[0]

    loop = traced(eqn, copies, operands[num_consts:], eqn.outvars)
    params = compat.with_constants("scan", loop.params, num_consts) | {"jaxpr": eqn.params["body_jaxpr"]}
    return loop.replace(invars=operands, params=params)


def _trips(eqn: Any, known: Known) -> int | None:
    """The number of iterations of a `while`, if its condition only tests what counts from a constant on."""
    params = eqn.params
    num_conditions, num_body = params["cond_nconsts"], params["body_nconsts"]
    first = num_conditions + num_body
    operands = [_of_constant(v, known) for v in eqn.invars]
    conditions, consts, starts = operands[:num_conditions], operands[num_conditions:first], operands[first:]
    if not any(isinstance(start, Counter) for start in starts):
        return None
    carries = [Counter(0, carry=k) if isinstance(start, Counter) else None for k, start in enumerate(starts)]
    advanced = _results(params["body_jaxpr"], [*consts, *carries])
    counters = [_from_start(start, new, k) for k, (start, new) in enumerate(zip(starts, advanced, strict=True))]
    (holds,) = _results(params["cond_jaxpr"], [*conditions, *counters])
    return int(holds.trips) if isinstance(holds, Lasting) and math.isfinite(holds.trips) else None


def _from_start(start: Value, advanced: Value, carry: int) -> Counter | None:
    """What a carry is in each iteration, given its initial value and what one iteration makes of it."""
    if not isinstance(start, Counter) or not isinstance(advanced, Counter) or advanced.carry != carry:
        return None
    return Counter(start.start, advanced.start)


def _of_constant(atom: Any, known: Known) -> Value:
    """What is known of an operand or a literal."""
    value = None if atom.aval.shape else constant(atom, known)
    if value is None:
        return None
    return Lasting(math.inf if value else 0) if atom.aval.dtype == bool else Counter(value)


def _results(jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
    """What is known of the results of a jaxpr."""
    source = compat.open_jaxpr(jaxpr)
    values = {v: x for v, x in zip(source.invars, inputs, strict=True) if x is not None}

    def read(atom: Any) -> Value:
        return _of_constant(atom, {}) if compat.is_literal(atom) else values.get(atom)

    for eqn in source.eqns:
        operands = [*map(read, eqn.invars)]
        if not any(operands):
            continue
        if eqn.primitive.name in CALLS:
            (_, _, body), *_ = compat.sub_jaxprs(eqn.params)
            found = _results(body, operands)
        else:
            found = [_result(eqn, operands)]
        values.update((v, x) for v, x in zip(eqn.outvars, found, strict=False) if x is not None)
    return [*map(read, source.outvars)]


def _result(eqn: Any, operands: Sequence[Value]) -> Value:
    """What is known of the only result of an equation on scalars."""
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    if aval.shape or any(v.aval.shape for v in eqn.invars):
        return None
    match operands:
        case [only] if name in SAME and eqn.invars[0].aval.dtype == aval.dtype:
            return only
        case [Lasting() as some, Lasting() as other] if name == "and":
            return min(some, other, key=lambda condition: condition.trips)
        case [Counter() as some, Counter() as other] if name in COMPARISONS:
            return _compared(name, some, other, eqn.invars[0].aval.dtype)
        case [Counter() as some, Counter() as other] if name in ("add", "sub"):
            return _sum(some, other, 1 if name == "add" else -1)
    return None


def _sum(some: Counter, other: Counter, sign: int) -> Counter | None:
    """A counter and another one times a sign; None unless at most one carry is added."""
    if other.carry is not None and (some.carry is not None or sign < 0):
        return None
    carry = other.carry if some.carry is None else some.carry
    return Counter(some.start + sign * other.start, some.step + sign * other.step, carry)


def _compared(name: str, some: Counter, other: Counter, dtype: Any) -> Lasting | None:
    """How long a comparison of two counters holds; None if it is not known, or they leave the range of their dtype."""
    if some.carry is not None or other.carry is not None:
        return None
    if name in ("ge", "gt"):
        some, other = other, some
    start, step = some.start - other.start - (name in ("ge", "le")), some.step - other.step
    if name == "eq":
        trips = 0 if start else 1 if step else math.inf
    elif name == "ne":
        reaches = step and start % step == 0 and -start // step >= 0
        trips = -start // step if reaches else math.inf if start else 0
    else:
        trips = 0 if start >= 0 else -(start // step) if step > 0 else math.inf
    if trips == math.inf:
        return None if some.step or other.step else Lasting(trips)
    ends = [x.start + k * x.step for x in (some, other) for k in (0, int(trips))]
    return Lasting(trips) if np.iinfo(dtype).min <= min(ends) and max(ends) <= np.iinfo(dtype).max else None
