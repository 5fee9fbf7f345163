"""Primitives that other packages define, as what they compute.

Many packages define a primitive and lower it by tracing its implementation: a linear solver, a reduction that `vmap`
leaves alone, a loop's write into a buffer. Such an equation becomes a call of the traced implementation, whose ops have
rules. Implementations that cannot be traced (on the host, or a custom call) stay: ops without a rule.
"""

from __future__ import annotations

from typing import Any

import jax

from .. import compat
from ..mesh import tracing_context
from ..rules import user_rules


def implementation(eqn: Any) -> Any:
    """A call of the implementation of an equation's primitive; itself if that is JAX's own, or can't be traced."""
    compute = compat.implementation(eqn)
    if compute is None or eqn.effects or user_rules.has(eqn.primitive.name, eqn.params):
        return eqn

    def call(*operands: jax.Array) -> Any:
        return compute(*operands, **eqn.params)

    call.__name__ = eqn.primitive.name
    try:
        with tracing_context(), compat.beside(eqn):
            traced = jax.make_jaxpr(jax.jit(call))(*(v.aval for v in eqn.invars))
    except Exception:  # whatever a package raises on tracers
        return eqn
    body = compat.open_jaxpr(traced).eqns[0]
    if compat.constants(traced) or _types(body.outvars) != _types(eqn.outvars):
        return eqn
    if any(_is_same_call(inner, eqn) for inner in compat.equations(body)):  # it dispatches the primitive
        return eqn
    return compat.new_eqn(eqn, eqn.invars, eqn.outvars, body.primitive, body.params)


def _types(atoms: Any) -> list[tuple[Any, Any]]:
    return [(v.aval.shape, v.aval.dtype) for v in atoms]


def _is_same_call(one: Any, other: Any) -> bool:
    return (
        one.primitive is other.primitive
        and _types(one.invars) == _types(other.invars)
        and all(repr(value) == repr(other.params.get(key)) for key, value in one.params.items())
    )
