"""Products whose result is transposed, as products of the operands in the other order.

Differentiation leaves a transposition behind the gradient of each weight. Compilers drop it, too, but only where no
constraint is in between, and move what they can behind loops only where it is dropped. What another product reads keeps
its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from ..graph.straight_line import num_uses
from ..rewrite.swapped_matmul import swap_permutation, swapped


def turned(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations of a jaxpr, with each product that is only transposed to the other order computed in that order."""
    makers: dict[Any, int] = {}
    found: list[Any] = []
    uses = num_uses(eqns, outvars)
    multiplied = {v for e in eqns if e.primitive.name == "dot_general" for v in e.invars if not compat.is_literal(v)}
    for eqn in eqns:
        is_transposed = eqn.primitive.name == "transpose" and multiplied.isdisjoint(eqn.outvars)
        at = makers.get(eqn.invars[0]) if is_transposed and uses[eqn.invars[0]] == 1 else None
        if at is not None and eqn.params["permutation"] == swap_permutation(found[at]):
            found[at] = eqn = swapped(found[at], eqn.outvars[0])
        else:
            at = len(found)
            found.append(eqn)
        if eqn.primitive.name == "dot_general":
            makers[eqn.outvars[0]] = at
    return found
