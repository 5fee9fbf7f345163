"""Redundant constraints: values that XLA shards as inferred without a constraint of their own.

XLA propagates shardings along factors, as this library does. A constraint is redundant if in every op that produces or
uses the value all arrays agree, factor by factor, and each of its axes comes from an operand that is constrained or
itself redundant. That holds for six of seven values of a transformer's train step, and every constraint left out saves
tracing, lowering and compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .. import compat
from ..graph import Op, Scope
from ..rules import Dims, Kind, Rule
from ..spec import Axis, Spec

ELEMENTWISE = frozenset(
    """
    abs add add_any and convert_element_type copy cos div eq exp ge gt integer_pow le log logistic lt max min mul ne neg
    not one_minus_square or pow rsqrt select_n sign sin sqrt square sub tanh
    """.split()
)
"""Ops that are lowered to elementwise HLO ops."""

TRUSTED = ELEMENTWISE | frozenset(
    """
    broadcast_in_dim concatenate dot_general pad reduce_max reduce_min reduce_sum reshape slice split squeeze transpose
    """.split()
)
"""Ops whose pass-through factors are the same in XLA as in our rules."""

ExactSpec = Callable[[Any], Spec | None]
"""Variable -> the spec to constrain it to if a sharding can express it exactly, else None."""


def redundant(
    scope: Scope, makers: dict[int, Op], exact_spec: ExactSpec, *, known: Iterable[Any], unknown_uses: Iterable[Any]
) -> set[Any]:
    """Returns the variables of one jaxpr whose constraints are redundant.

    Args:
        scope: the jaxpr and its variables' values.
        makers: value -> the op that produces it.
        exact_spec: the spec of each variable.
        known: arguments that already have their specs.
        unknown_uses: results whose uses are not known.
    """
    known, needed = set(known), {v for v in unknown_uses if not compat.is_literal(v)}
    implied: set[Any] = set()
    for eqn in scope.jaxpr.eqns:
        arrays = [v for v in eqn.invars if _is_array(v, scope)]
        op = _trusted(eqn, scope, makers)
        if op is None:
            needed.update(arrays)
        else:
            needed.update(_conflicting(eqn, op, arrays, scope, exact_spec))
            if known.issuperset(arrays):
                implied.update(_implied(eqn, op, scope, exact_spec))
        known.update(eqn.outvars)
    return implied - needed


def _is_array(var: Any, scope: Scope) -> bool:
    return not compat.is_literal(var) and bool(var.aval.shape) and scope.env[var] is not None


def _trusted(eqn: Any, scope: Scope, makers: dict[int, Op]) -> Op | None:
    """Returns the op of an equation in `TRUSTED`."""
    if eqn.primitive.name not in TRUSTED or any(map(compat.is_drop, eqn.outvars)):
        return None
    atom = scope.env[eqn.outvars[0]]
    op = None if atom is None else makers.get(atom)
    return op if op is not None and op.name == eqn.primitive.name and op.rule is not None else None


def _conflicting(eqn: Any, op: Op, arrays: list[Any], scope: Scope, exact_spec: ExactSpec) -> set[Any]:
    """Returns the arrays of an op with a factor sharded differently in another array, or with no exact spec."""
    specs = {v: exact_spec(v) for v in (*arrays, *eqn.outvars)}
    if eqn.primitive.name in ELEMENTWISE and None not in specs.values() and len({*specs.values()}) == 1:
        return set()
    assert op.rule is not None
    pairs = list(_arrays(eqn, op, scope))
    conflicts = _conflicting_factors(op.rule, [(specs[v], dims) for v, dims in pairs])
    return {v for v, dims in pairs if specs[v] is None or any(f in conflicts for factors in dims for f in factors)}


def _conflicting_factors(rule: Rule, arrays: list[tuple[Spec | None, Dims]]) -> set[int]:
    """Returns the sharded factors that two arrays shard differently, or that do not propagate."""
    seen: dict[int, tuple[tuple[int, ...], tuple[Axis, ...]]] = {}
    conflicts: set[int] = set()
    for spec, dims in arrays:
        for d, factors in enumerate(dims):
            axes = spec.dims[d].axes if spec is not None else ()
            for f in factors:
                have = seen.setdefault(f, (factors, axes))
                is_sharded = have[1] or axes
                if spec is None or (is_sharded and (have != (factors, axes) or _stops(rule, f))):
                    conflicts.add(f)
    return conflicts


def _stops(rule: Rule, factor: int) -> bool:
    return factor in rule.blocked or rule.kinds[factor] in (Kind.PERMUTE, Kind.REPLICATE)


def _arrays(eqn: Any, op: Op, scope: Scope) -> Iterator[tuple[Any, Dims]]:
    """Yields (variable, factors) of each array of an op that is not a constant."""
    assert op.rule is not None
    for v, dims in zip(eqn.invars, op.rule.operands, strict=True):
        if _is_array(v, scope):
            yield v, dims
    yield from zip(eqn.outvars, op.rule.results, strict=True)


def _implied(eqn: Any, op: Op, scope: Scope, exact_spec: ExactSpec) -> Iterator[Any]:
    """Yields the results of an op all of whose axes come from an operand."""
    assert op.rule is not None
    brought = {dim for v, dims in zip(eqn.invars, op.rule.operands, strict=True) if _is_array(v, scope) for dim in dims}
    for v, dims in zip(eqn.outvars, op.rule.results, strict=True):
        spec = exact_spec(v)
        if brought and spec is not None:
            if all(not dim.axes or factors in brought for dim, factors in zip(spec.dims, dims, strict=True)):
                yield v
