"""Equations of jaxprs: traced from a function, inlined, compared, and their uses counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from .. import compat


def traced(like: Any, f: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any] | None = None) -> Any:
    """The equation that computes a function.

    Args:
        like: the equation whose source line and name stack it gets.
        f: a function that traces to a single equation.
        operands: variables or literals.
        results: variables; new ones if not given.
    """
    jaxpr = compat.open_jaxpr(jax.make_jaxpr(f)(*(v.aval for v in operands)))
    (eqn,) = jaxpr.eqns
    given = dict(zip(jaxpr.invars, operands, strict=True))
    invars = [v if compat.is_literal(v) else given[v] for v in eqn.invars]
    outvars = [jex.Var(v.aval) for v in eqn.outvars] if results is None else results
    return compat.new_eqn(like, invars, outvars, eqn.primitive, eqn.params)


def inlined(jaxpr: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The equations of a jaxpr without constants on some operands, with new variables; and its results."""
    body = compat.open_jaxpr(jaxpr)
    names = dict(zip(body.invars, operands, strict=True))
    eqns = [compat.renamed(eqn, names) for eqn in body.eqns]
    return eqns, [v if compat.is_literal(v) else names[v] for v in body.outvars]
