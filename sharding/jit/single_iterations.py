"""Loops of one iteration, as what they compute: XLA runs no loop either.

What the backward pass computes again, without a barrier, then is equal to what the forward pass computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex

from .. import compat

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
    body, (num_consts, num_carry) = compat.open_jaxpr(eqn.params["jaxpr"]), compat.scan_parts(eqn.params)
    names = dict(zip(body.invars[: num_consts + num_carry], eqn.invars, strict=False))
    pairs = zip(body.invars[num_consts + num_carry :], eqn.invars[num_consts + num_carry :], strict=True)
    for row, stack in pairs:
        (squeeze,) = compat.open_jaxpr(jax.make_jaxpr(partial(jax.lax.squeeze, dimensions=(0,)))(stack.aval)).eqns
        names[row] = compat.new_var(row.aval)
        yield compat.new_eqn(eqn, [stack], [names[row]], squeeze.primitive, squeeze.params)
    yield from _inlined(body, names)
    results = [v if compat.is_literal(v) else names[v] for v in body.outvars]
    for k, (result, outvar) in enumerate(zip(results, eqn.outvars, strict=True)):
        if compat.is_drop(outvar):
            continue
        if k < num_carry:
            yield compat.new_eqn(eqn, [result], [outvar], same_as_p, {})
        else:
            stacked = jax.make_jaxpr(lambda x: jax.lax.broadcast_in_dim(x, (1, *x.shape), range(1, x.ndim + 1)))
            (broadcast,) = compat.open_jaxpr(stacked(result.aval)).eqns
            yield compat.new_eqn(eqn, [result], [outvar], broadcast.primitive, broadcast.params)


def _inlined(body: Any, names: dict[Any, Any]) -> Iterator[Any]:
    """The equations of a body in terms of outer names, and those of its loops of one iteration and recomputations."""
    for eqn in body.eqns:
        inner = compat.renamed(eqn, names)
        if _is_plain_call(inner):
            called = compat.open_jaxpr(inner.params["jaxpr"])
            own = dict(zip(called.invars, inner.invars, strict=True))
            yield from _inlined(called, own)
            for outvar, v in zip(inner.outvars, called.outvars, strict=True):
                if not compat.is_drop(outvar):
                    yield compat.new_eqn(eqn, [v if compat.is_literal(v) else own[v]], [outvar], same_as_p, {})
        else:
            yield from unrolled(inner)


def _is_plain_call(eqn: Any) -> bool:
    """Whether an equation computes something for the backward pass again, but not behind a barrier."""
    is_differentiated = eqn.primitive.name in ("checkpoint", "remat2") and bool(eqn.params.get("differentiated"))
    return is_differentiated and not compat.is_recomputed(eqn) and not eqn.effects
