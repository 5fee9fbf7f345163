"""Values that a `while` only passes on from iteration to iteration, as the constants that they are.

`jax.lax.while_loop` finds those of a plain body; a body whose selections have known conditions has more. XLA takes them
out of loops too.
"""

from __future__ import annotations

from typing import Any

from .. import compat
from ..graph.straight_line import num_uses
from .equations import are_alike


def carried_as_constants(eqn: Any) -> tuple[Any, dict[Any, Any]]:
    """A `while` whose unchanged carries are constants, and its dropped results with the operands that they are.

    Any other equation is returned as it is.
    """
    if eqn.primitive.name != "while" or eqn.effects:
        return eqn, {}
    params = eqn.params
    conditions, body = compat.open_jaxpr(params["cond_jaxpr"]), compat.open_jaxpr(params["body_jaxpr"])
    num_conditions, num_body = params["cond_nconsts"], params["body_nconsts"]
    first = num_conditions + num_body
    initial, inside, tested = eqn.invars[first:], body.invars[num_body:], conditions.invars[num_conditions:]
    unchanged = [k for k, out in enumerate(body.outvars) if out is inside[k] and are_alike(initial[k], eqn.outvars[k])]
    if not unchanged:
        return eqn, {}
    kept = [k for k in range(len(initial)) if k not in unchanged]
    uses = num_uses(conditions.eqns, conditions.outvars)
    in_condition = [k for k in unchanged if uses[tested[k]]]
    condition = compat.rebuild(
        params["cond_jaxpr"],
        invars=[*conditions.invars[:num_conditions], *(tested[k] for k in (*in_condition, *kept))],
        eqns=conditions.eqns,
        outvars=conditions.outvars,
    )
    advance = compat.rebuild(
        params["body_jaxpr"],
        invars=[*body.invars[:num_body], *(inside[k] for k in (*unchanged, *kept))],
        eqns=body.eqns,
        outvars=[body.outvars[k] for k in kept],
    )
    new = params | {
        "cond_jaxpr": condition,
        "cond_nconsts": num_conditions + len(in_condition),
        "body_jaxpr": advance,
        "body_nconsts": num_body + len(unchanged),
    }
    operands = [
        *eqn.invars[:num_conditions],
        *(initial[k] for k in in_condition),
        *eqn.invars[num_conditions:first],
        *(initial[k] for k in (*unchanged, *kept)),
    ]
    loop = eqn.replace(invars=operands, outvars=[eqn.outvars[k] for k in kept], params=new)
    return loop, {eqn.outvars[k]: initial[k] for k in unchanged if not compat.is_drop(eqn.outvars[k])}
