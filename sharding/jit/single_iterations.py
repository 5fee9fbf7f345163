"""Loops of one iteration, and those that are unrolled whole, as what they compute: XLA runs no loop either.

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

MOST_EQUATIONS = 1 << 14
"""Most equations that an unrolled loop becomes; a larger one stays a loop here."""

same_as_p = jex.Primitive("same_as")
"""Says in a list of equations that a variable is another name of an operand; in no jaxpr."""


def unrolled(eqn: Any) -> list[Any]:
    """The equations of a `scan` without a loop, with `same_as` where names differ; any other equation as it is."""
    if eqn.primitive.name != "scan" or eqn.effects or not _is_straight(eqn.params):
        return [eqn]
    if compat.constants(eqn.params["jaxpr"]):
        return [eqn]
    return [*_iterations(eqn)]


def _is_straight(params: dict[str, Any]) -> bool:
    """Whether a `scan` lowers to no loop, and to a program of a size that is worked on at once.

    One that only carries values stays a loop, whose iterations are all sharded alike.
    """
    length, body = params["length"], compat.open_jaxpr(params["jaxpr"])
    has_stacks = len(body.invars) > sum(compat.scan_parts(params))
    is_unrolled = has_stacks and 1 < length <= params["unroll"]
    return length == 1 or (is_unrolled and length * len(body.eqns) <= MOST_EQUATIONS)


def _iterations(eqn: Any) -> Iterator[Any]:
    length = eqn.params["length"]
    num_consts, num_carry = compat.scan_parts(eqn.params)
    carry, stacks = eqn.invars[num_consts : num_consts + num_carry], eqn.invars[num_consts + num_carry :]
    made: dict[int, list[Any]] = {}
    """Iteration -> the rows that it makes."""
    for k in range(length)[:: -1 if eqn.params["reverse"] else 1]:
        rows: list[Any] = []
        for stack in stacks:
            found = _row(eqn, stack, k)
            yield from found
            rows += found[-1].outvars
        eqns, results = inlined(eqn.params["jaxpr"], [*eqn.invars[:num_consts], *carry, *rows])
        yield from _inside(eqns)
        carry, made[k] = results[:num_carry], results[num_carry:]
    for result, outvar in zip(carry, eqn.outvars[:num_carry], strict=True):
        if not compat.is_drop(outvar):
            yield compat.new_eqn(eqn, [result], [outvar], same_as_p, {})
    for i, outvar in enumerate(eqn.outvars[num_carry:]):
        if not compat.is_drop(outvar):
            yield from _stacked(eqn, [made[k][i] for k in range(length)], outvar)


def _row(eqn: Any, stack: Any, k: int) -> list[Any]:
    """The equations that read a row of a stack."""
    part = partial(jax.lax.slice_in_dim, start_index=k, limit_index=k + 1)
    slices = [traced(eqn, part, [stack])] if eqn.params["length"] > 1 else []
    row = partial(jax.lax.squeeze, dimensions=(0,))
    return [*slices, traced(eqn, row, slices[0].outvars if slices else [stack])]


def _stacked(eqn: Any, rows: Sequence[Any], outvar: Any) -> Iterator[Any]:
    """The equations that put rows side by side."""
    expand = partial(jax.lax.expand_dims, dimensions=(0,))
    if len(rows) == 1:
        yield traced(eqn, expand, rows, [outvar])
        return
    expanded = [traced(eqn, expand, [row]) for row in rows]
    yield from expanded
    yield traced(eqn, lambda *parts: jax.lax.concatenate(parts, 0), [e.outvars[0] for e in expanded], [outvar])


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
