"""Loops of one iteration, as what they compute: XLA runs no loop either.

What the backward pass computes again, without a barrier, then is equal to what the forward pass computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex

from .. import compat
from .equations import inlined, traced

same_as_p = jex.Primitive("same_as")
"""Says in a list of equations that a variable is another name of an operand; in no jaxpr."""


def unrolled(eqn: Any) -> list[Any]:
    """The equations of a `scan` of one iteration, with `same_as` where names differ; any other equation as it is."""
    if eqn.primitive.name != "scan" or eqn.params["length"] != 1 or eqn.effects:
        return [eqn]
    if compat.constants(eqn.params["jaxpr"]):
        return [eqn]
    return [*_iteration(eqn)]


def _iteration(eqn: Any) -> Iterator[Any]:
    num_consts, num_carry = compat.scan_parts(eqn.params)
    first = num_consts + num_carry
    rows = [traced(eqn, partial(jax.lax.squeeze, dimensions=(0,)), [stack]) for stack in eqn.invars[first:]]
    yield from rows
    eqns, results = inlined(eqn.params["jaxpr"], [*eqn.invars[:first], *(row.outvars[0] for row in rows)])
    yield from _inside(eqns)
    for k, (result, outvar) in enumerate(zip(results, eqn.outvars, strict=True)):
        if compat.is_drop(outvar):
            continue
        if k < num_carry:
            yield compat.new_eqn(eqn, [result], [outvar], same_as_p, {})
        else:
            yield traced(eqn, partial(jax.lax.expand_dims, dimensions=(0,)), [result], [outvar])


def _inside(eqns: Sequence[Any]) -> Iterator[Any]:
    """The equations of a body, and those of its loops of one iteration and recomputations."""
    for eqn in eqns:
        if _is_plain_call(eqn):
            inner, results = inlined(eqn.params["jaxpr"], eqn.invars)
            yield from _inside(inner)
            for result, outvar in zip(results, eqn.outvars, strict=True):
                if not compat.is_drop(outvar):
                    yield compat.new_eqn(eqn, [result], [outvar], same_as_p, {})
        else:
            yield from unrolled(eqn)


def _is_plain_call(eqn: Any) -> bool:
    """Whether an equation computes something for the backward pass again, but not behind a barrier."""
    is_differentiated = eqn.primitive.name in ("checkpoint", "remat2") and bool(eqn.params.get("differentiated"))
    return is_differentiated and not compat.is_recomputed(eqn) and not eqn.effects
