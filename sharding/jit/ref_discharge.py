"""Programs without the `jax.Ref`s that they make: their values are passed on instead."""

from __future__ import annotations

from typing import Any

from .. import compat


def without_refs(jaxpr: Any) -> Any:
    """A closed jaxpr that makes no `Ref`s, but passes on their values; itself if it makes none."""
    if not compat.makes_refs(jaxpr):
        return jaxpr
    return compat.discharge.discharge_state(_with_dischargeable_calls(jaxpr))


def _with_dischargeable_calls(jaxpr: Any) -> Any:
    """The jaxpr without the refs made in bodies that JAX cannot discharge, those of functions with derivative rules."""
    eqns = []
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if compat.makes_refs(eqn) and any(True for _ in compat.sub_jaxprs(eqn.params)):
            eqn = _discharged(eqn)
        eqns.append(eqn)
    return compat.rebuild(jaxpr, eqns=eqns, outvars=compat.open_jaxpr(jaxpr).outvars)


def _discharged(eqn: Any) -> Any:
    """A call or loop whose body can be discharged with it, or is."""
    partial = getattr(compat.discharge, "_partial_discharge_rules", {})  # of scans, before JAX 0.12
    has_rule = eqn.primitive in compat.discharge._discharge_rules or eqn.primitive in partial
    params, effects = eqn.params, eqn.effects
    for key, pos, body in compat.sub_jaxprs(eqn.params):
        new = _with_dischargeable_calls(body) if has_rule else without_refs(body)
        params = compat.with_jaxpr(params, key, pos, new)
        effects = effects if has_rule else new.effects
    return eqn.replace(params=params, effects=effects)
