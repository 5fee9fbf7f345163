"""Common-subexpression elimination of a traced program, before its shardings are inferred.

XLA merges equal instructions too, but never equal collectives, since each has a channel of its own. A gradient norm
that is computed once to clip and once to report is computed, and reduced, once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from .. import compat
from ..annotations import annotate
from ..annotations.propagation_barrier import barrier_p
from ..annotations.same import same_p

KEPT = frozenset({"checkpoint", "optimization_barrier", "remat", "remat2"})
"""Primitives that exist to compute something once more."""

MERGED_INSIDE = frozenset("checkpoint closed_call cond core_call jit pjit remat remat2 scan shard_map while".split())
"""Primitives in whose bodies equal equations are merged, too."""


def merge_equal(jaxpr: Any) -> Any:
    """The same jaxpr without equations that repeat an earlier one of their body; itself if there is none."""
    return _Merger().jaxpr(jaxpr)


class _Merger:
    def __init__(self) -> None:
        self.done: dict[int, tuple[Any, Any]] = {}
        """Id of a jaxpr -> the jaxpr, which keeps the id valid, and its result."""

    def jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self.done:
            self.done[id(jaxpr)] = (jaxpr, self.merged(jaxpr))
        return self.done[id(jaxpr)][1]

    def merged(self, jaxpr: Any) -> Any:
        source = compat.open_jaxpr(jaxpr)
        first: dict[Hashable, Any] = {}
        same: dict[Any, Any] = {}
        eqns, is_changed = [], False

        def read(atom: Any) -> Any:
            return atom if compat.is_literal(atom) else same.get(atom, atom)

        for eqn in source.eqns:
            params = self.parameters(eqn)
            if params is not eqn.params or any(read(v) is not v for v in eqn.invars):
                eqn, is_changed = eqn.replace(params=params, invars=[read(v) for v in eqn.invars]), True
            key = _key(eqn)
            earlier = first.setdefault(key, eqn) if key is not None else eqn
            pairs = list(zip(eqn.outvars, earlier.outvars, strict=True))
            if earlier is not eqn and not any(compat.is_drop(old) and not compat.is_drop(new) for new, old in pairs):
                same.update((new, old) for new, old in pairs if not compat.is_drop(new))
                is_changed = True
            else:
                eqns.append(eqn)
        return compat.rebuild(jaxpr, eqns=eqns, outvars=[*map(read, source.outvars)]) if is_changed else jaxpr

    def parameters(self, eqn: Any) -> dict[str, Any]:
        """The parameters of an equation with merged bodies; the same object if none changed."""
        params = eqn.params
        for key, position, body in compat.sub_jaxprs(params) if eqn.primitive.name in MERGED_INSIDE else ():
            new = self.jaxpr(body)
            if new is not body:
                params = compat.with_jaxpr(params, key, position, new)
        return params


def _key(eqn: Any) -> Hashable | None:
    """What two equal equations have in common; None for those that are never merged."""
    if eqn.effects or eqn.primitive.name in KEPT or eqn.primitive in (annotate.annotate_p, barrier_p, same_p):
        return None
    operands = tuple((str(v.aval), repr(v.val)) if compat.is_literal(v) else v for v in eqn.invars)
    if any(compat.is_literal(v) and v.aval.shape for v in eqn.invars):
        return None
    params = tuple((name, type(value), value) for name, value in sorted(eqn.params.items()))
    key = (eqn.primitive, params, operands, tuple(str(v.aval) for v in eqn.outvars))
    try:
        hash(key)
    except TypeError:
        return None
    return key
