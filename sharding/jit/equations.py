"""Equations of jaxprs: traced from a function, inlined, compared, and their uses counted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .. import compat

SIDE_BY_SIDE = frozenset({"concatenate", "stack"})
"""Primitives that put arrays side by side."""


def traced(like: Any, f: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any] | None = None) -> Any:
    """The equation that computes a function.

    Args:
        like: the equation whose source line and name stack it gets.
        f: a function that traces to a single equation.
        operands: variables or literals.
        results: variables; new ones if not given.
    """
    with compat.beside(like):
        jaxpr = compat.open_jaxpr(jax.make_jaxpr(f)(*(v.aval for v in operands)))
    (eqn,) = jaxpr.eqns
    given = dict(zip(jaxpr.invars, operands, strict=True))
    invars = [v if compat.is_literal(v) else given[v] for v in eqn.invars]
    outvars = [jex.Var(v.aval) for v in eqn.outvars] if results is None else results
    return compat.new_eqn(like, invars, outvars, eqn.primitive, eqn.params)


def zeros_instead(eqn: Any) -> Any:
    """An equation whose result is an array of zeros instead."""
    (result,) = eqn.outvars
    return traced(eqn, lambda: jnp.zeros(result.aval.shape, result.aval.dtype), [], [result])


def are_alike(some: Any, other: Any) -> bool:
    """Whether two atoms have the same type, weak types and shardings included."""
    return str(some.aval) == str(other.aval)


def is_placed(eqn: Any) -> bool:
    """Whether an equation names axes that its result is sharded over; specs over Auto axes name none."""
    given = (eqn.params.get("out_sharding"), eqn.params.get("sharding"))
    return any(sharding is not None and any(sharding.spec) for sharding in given)


def dim_of_parts(maker: Any) -> int:
    """The dim along which an equation puts arrays side by side."""
    return maker.params["axis" if maker.primitive.name == "stack" else "dimension"]


def inlined(jaxpr: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The equations of a jaxpr without constants on some operands, with new variables; and its results."""
    body = compat.open_jaxpr(jaxpr)
    names = dict(zip(body.invars, operands, strict=True))
    eqns = [compat.renamed(eqn, names) for eqn in body.eqns]
    return eqns, [v if compat.is_literal(v) else names[v] for v in body.outvars]


def inlined_call(call: Any) -> list[Any]:
    """The equations that a call runs; itself if it has effects or constants, or returns one of its operands."""
    if call.effects or not compat.has_free_shardings(call):
        return [call]
    (_, _, jaxpr), *_ = compat.sub_jaxprs(call.params)
    eqns, results = inlined(jaxpr, call.invars)
    made = {v for eqn in eqns for v in eqn.outvars}
    is_fresh = all(not compat.is_literal(v) and v in made for v in results) and len({*results}) == len(results)
    if compat.constants(jaxpr) or not is_fresh:
        return [call]
    names = {v: out for v, out in zip(results, call.outvars, strict=True) if not compat.is_drop(out)}
    return [
        _called(eqn, call).replace(
            invars=[v if compat.is_literal(v) else names.get(v, v) for v in eqn.invars],
            outvars=[names.get(v, v) for v in eqn.outvars],
        )
        for eqn in eqns
    ]


def without_unused(eqns: Sequence[Any], outvars: Sequence[Any], removable: Collection[Any]) -> list[Any]:
    """The equations but those of which nothing reads the results, if all of these are removable."""
    used = {v for v in outvars if not compat.is_literal(v)}
    found: list[Any] = []
    for eqn in reversed(eqns):
        if not eqn.outvars or any(v in used or v not in removable for v in eqn.outvars):
            used.update(v for v in eqn.invars if not compat.is_literal(v))
            found.append(eqn)
    return found[::-1]


def _called(eqn: Any, call: Any) -> Any:
    """An equation of a call's body with the call's name stack, and its source line if it has none of its own."""
    own, outer = eqn.source_info, call.source_info
    traceback = own.traceback if compat.source_line(eqn) else outer.traceback
    return eqn.replace(source_info=own.replace(name_stack=outer.name_stack + own.name_stack, traceback=traceback))
