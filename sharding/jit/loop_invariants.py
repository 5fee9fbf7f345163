"""Loop-invariant code motion: what every iteration of a loop would compute, and reduce, again is computed before it.

XLA does this on CPUs and TPUs, after partitioning; on GPUs a sum of an invariant is reduced in every iteration. Only
ops that do work are moved (reductions, products, gathers, ...) and those that make an operand of a product, such as
rounded weights, with the elementwise and shape ops that they need, and index arithmetic; and only where the results
take no more memory than the operands, as they are stored for as long as the loop runs. A call in the body is inlined if
something in it is moved.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from .. import compat
from ..annotations.propagation_barrier import barrier_p
from ..rules import CONSTANT_PRESERVING, ELEMENTWISE
from .constant_folding import GIVEN_OPERANDS
from .equations import inlined_call

LOOPS = {"scan": "jaxpr", "while": "body_jaxpr"}
"""Loop -> the parameter with its body."""

STAY = frozenset({"checkpoint", "optimization_barrier", "remat", "remat2"})
"""Primitives that say when something is computed."""

CHEAP = ELEMENTWISE | CONSTANT_PRESERVING | frozenset("annotate copy_p pad rev same slice squeeze transpose".split())
"""Primitives that are moved only if another one needs them."""


PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})
"""Primitives whose operands are moved by themselves."""


def hoist(eqn: Any) -> list[Any]:
    """A `scan` or `while` with the equations to run before it; any other equation as it is."""
    if eqn.primitive.name not in LOOPS:
        return [eqn]
    key, body = LOOPS[eqn.primitive.name], _body(eqn)
    first, end = constants_of(eqn)
    outside = dict(zip(body.invars, eqn.invars[first:end], strict=False))
    eqns = _with_inlined_calls(body.eqns, outside)
    moved = _moved(eqns, outside)
    if not moved:
        return [eqn]
    before = [compat.renamed(e, outside) for e in moved.values()]
    kept = [e for e in eqns if id(e) not in moved]
    read = {v for e in kept for v in e.invars if not compat.is_literal(v)}
    read.update(v for v in body.outvars if not compat.is_literal(v))
    new = [v for e in moved.values() for v in e.outvars if v in read]
    at = end - first
    invars = [*body.invars[:at], *new, *body.invars[at:]]
    params = eqn.params | {key: compat.rebuild(eqn.params[key], invars=invars, eqns=kept, outvars=body.outvars)}
    operands = [*eqn.invars[:end], *(outside[v] for v in new), *eqn.invars[end:]]
    return [*before, eqn.replace(invars=operands, params=compat.with_constants(eqn.primitive.name, params, len(new)))]


def _body(loop: Any) -> Any:
    return compat.open_jaxpr(loop.params[LOOPS[loop.primitive.name]])


def constants_of(eqn: Any) -> tuple[int, int]:
    """The range of a loop's operands that are constants of its body."""
    if eqn.primitive.name == "scan":
        return 0, compat.scan_parts(eqn.params)[0]
    first = eqn.params["cond_nconsts"]
    return first, first + eqn.params["body_nconsts"]


def _with_inlined_calls(eqns: Sequence[Any], outside: Collection[Any]) -> list[Any]:
    """The equations of a body; calls are inlined if something in them can run before the loop."""
    invariant = set(outside)
    found: list[Any] = []
    for eqn in eqns:
        is_invariant = [compat.is_literal(v) or v in invariant for v in eqn.invars]
        is_call = eqn.primitive.name in GIVEN_OPERANDS
        inner = inlined_call(eqn) if is_call and any(is_invariant) and not all(is_invariant) else [eqn]
        if inner != [eqn]:
            inner = _with_inlined_calls(inner, invariant)
            found += inner if _moved(inner, invariant) else [eqn]
        else:
            found.append(eqn)
        if all(is_invariant) and _is_movable(eqn):
            invariant.update(eqn.outvars)
    return found


def _moved(eqns: Sequence[Any], outside: Collection[Any]) -> dict[int, Any]:
    """The equations of a body to run before the loop, in order, by id."""
    makers: dict[Any, Any] = {}
    invariant = set(outside)
    moved: set[int] = set()
    factors = _factors(eqns)

    def move(eqn: Any) -> None:
        waiting = [eqn]
        while waiting:
            one = waiting.pop()
            if id(one) not in moved:
                moved.add(id(one))
                waiting += [makers[v] for v in one.invars if not compat.is_literal(v) and v in makers]

    for eqn in eqns:
        if not all(compat.is_literal(v) or v in invariant for v in eqn.invars) or not _is_movable(eqn):
            continue
        invariant.update(eqn.outvars)
        makers.update((v, eqn) for v in eqn.outvars)
        is_factor = not factors.isdisjoint(eqn.outvars) and eqn.primitive.name != "annotate"
        if (_works(eqn) or is_factor) and num_bytes(eqn.outvars) <= num_bytes(eqn.invars):
            move(eqn)
    return {id(eqn): eqn for eqn in eqns if id(eqn) in moved}


def _factors(eqns: Sequence[Any]) -> set[Any]:
    """The operands of products, also of those in nested loops that read them in every iteration."""
    found: set[Any] = set()
    for eqn in eqns:
        if eqn.primitive.name in PRODUCTS:
            found.update(v for v in eqn.invars if not compat.is_literal(v))
        elif eqn.primitive.name in LOOPS:
            body, (first, end) = _body(eqn), constants_of(eqn)
            inner = _factors(body.eqns)
            pairs = zip(eqn.invars[first:end], body.invars, strict=False)
            found.update(v for v, argument in pairs if argument in inner and not compat.is_literal(v))
    return found


def _is_movable(eqn: Any) -> bool:
    return not eqn.effects and all(
        e.primitive.name not in STAY and e.primitive is not barrier_p for e in compat.equations(eqn)
    )


def _works(eqn: Any) -> bool:
    """Whether an equation does more than cheap equations do, or makes indices."""
    if all(jnp.issubdtype(v.aval.dtype, jnp.integer) for v in eqn.outvars):
        return True
    return any(e.primitive.name not in CHEAP and not any(compat.sub_jaxprs(e.params)) for e in compat.equations(eqn))


def num_bytes(atoms: Sequence[Any]) -> int:
    """Bytes of some arrays; those of other types, such as random keys, count per element."""
    return sum(math.prod(a.aval.shape) * getattr(a.aval.dtype, "itemsize", 1) for a in atoms)
