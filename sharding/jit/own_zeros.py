"""Zeros that scans read in each iteration, such as what a sum begins with, as zeros in their bodies.

Compilers find out that adding one changes nothing, and reduce the sum behind the loop.
"""

from __future__ import annotations

from typing import Any

from .. import compat
from ..graph.straight_line import are_same


def with_own_zeros(eqn: Any) -> Any:
    """A scan whose body has the zeros that it is given as constants; any other equation as it is."""
    if eqn.primitive.name != "scan":
        return eqn
    jaxpr, (number, _) = eqn.params["jaxpr"], compat.scan_parts(eqn.params)
    body = compat.open_jaxpr(jaxpr)
    zeros = {
        inside: compat.new_literal(given.val, inside.aval)
        for inside, given in zip(body.invars[:number], eqn.invars, strict=False)
        if compat.is_literal(given) and not given.aval.shape and given.val == 0
    }
    if not zeros:
        return eqn

    def read(atom: Any) -> Any:
        return atom if compat.is_literal(atom) else zeros.get(atom, atom)

    eqns = [
        e.replace(invars=[*map(read, e.invars)]) if any(read(v) is not v for v in e.invars) else e for e in body.eqns
    ]
    if are_same(eqns, body.eqns):
        return eqn
    new = compat.rebuild(jaxpr, eqns=eqns, outvars=body.outvars)
    return eqn.replace(params=eqn.params | {"jaxpr": new})
