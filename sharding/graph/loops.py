"""Graph of `scan`, `while` and `cond`: bodies appear once, tied by edges to the values outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import compat
from ..annotations.divergent_control_flow import declared_trip_count
from ..rules import Flow, Rule, rule_for
from .from_jaxpr import Builder
from .graph import Loop, Scope, line


def scan(b: Builder, scope: Scope, i: int, eqn: Any, times: int) -> None:
    """Adds a `scan`: edges for constants, carry and stacked arrays; slice and update ops in the body for `xs` and `ys`.

    The edges follow the body, those of `xs` first and those of `ys` last, as in Shardy: the order decides conflicts.
    """
    n_consts, n_carry = compat.scan_parts(eqn.params)
    length, body = eqn.params["length"], compat.open_jaxpr(eqn.params["jaxpr"])
    consts = _carry(b, eqn.invars[:n_consts], eqn)
    inits = eqn.invars[n_consts : n_consts + n_carry]
    carry = _carry(b, inits, eqn)
    stacks = _carry(b, eqn.invars[n_consts + n_carry :], eqn)
    xs = [
        _slice(b, stack, var, eqn, times * length)
        for stack, var in zip(stacks, body.invars[n_consts + n_carry :], strict=True)
    ]
    child = b.body(eqn, body, [*consts, *carry, *xs], times * length)
    scope.children[i, "jaxpr", 0] = child
    outs = [b.use(a, v.aval) for a, v in zip(b.outs(child), body.outvars, strict=True)]
    made = [
        _update(b, out, var, eqn, times * length)
        for out, var in zip(outs[n_carry:], eqn.outvars[n_carry:], strict=True)
    ]
    _enter(b, eqn.invars[n_consts + n_carry :], stacks, scope, eqn, times)
    _enter(b, eqn.invars[:n_consts], consts, scope, eqn, times)
    for init, out, var, target in zip(inits, outs, body.outvars, carry, strict=False):
        b.edge([b.use(b.read(scope, init), init.aval), out], target, eqn, times)
        b.depend([target], scope.scalars_of([init]) | child.scalars_of([var]))
    ys = _carry(b, eqn.outvars[n_carry:], eqn)
    for one, var, y in zip(made, body.outvars[n_carry:], ys, strict=True):
        b.edge([one], y, eqn, times)
        b.depend([y], child.scalars_of([var]))
    scope.entries[i] = [*consts, *carry, *[None] * len(xs)]
    child.exits = [*carry, *[None] * len(ys)]
    child.stacked_inputs = [*[None] * (n_consts + n_carry), *stacks]
    child.stacked_outputs = [*[None] * n_carry, *made]
    b.bind(scope, eqn, [*carry, *ys])


def _slice(b: Builder, stack: int, var: Any, eqn: Any, times: int) -> int:
    """Adds the slice of a stacked array that one iteration reads."""
    x, shape = b.value(var.aval, eqn), b.graph.shapes[stack]
    rule = rule_for("dynamic_slice", [shape], [(1, *var.aval.shape)], {})
    b.op("scan xs", [stack], [x], _drop_lead(rule, operand=False), eqn, times)
    return x


def _update(b: Builder, out: int, var: Any, eqn: Any, times: int) -> int:
    """Adds the update of a stacked array with the output of one iteration."""
    stack, shape = b.value(var.aval, eqn), var.aval.shape
    rule = rule_for("dynamic_update_slice", [shape, (1, *b.graph.shapes[out])], [shape], {})
    b.op("scan ys", [out], [stack], _drop_lead(rule, operand=True), eqn, times)
    return stack


def while_(b: Builder, scope: Scope, i: int, eqn: Any, times: int) -> None:
    """Adds the condition and the body of a `while` once, with edges for constants and carry.

    The body counts as often as ``divergence.declare_trip_count`` states, otherwise once; the condition once more, since
    its last evaluation ends the loop.
    """
    p = eqn.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    consts = _carry(b, eqn.invars[: n_cond + n_body], eqn)
    inits = eqn.invars[n_cond + n_body :]
    carry = _carry(b, inits, eqn)
    declared, around = declared_trip_count(compat.name_stack(eqn)), b.loops
    rounds, source = math.ceil(times * (declared or 1)), line((eqn, *b.around))
    b.loops = around if declared else (*around, Loop(source, is_condition=True))
    condition = b.body(eqn, p["cond_jaxpr"], [*consts[:n_cond], *carry], times + rounds)
    scope.children[i, "cond_jaxpr", 0] = condition
    b.loops = around if declared else (*around, Loop(source, is_condition=False))
    child = b.body(eqn, p["body_jaxpr"], [*consts[n_cond:], *carry], rounds)
    scope.children[i, "body_jaxpr", 0] = child
    b.loops = around
    _enter(b, eqn.invars[: n_cond + n_body], consts, scope, eqn, times)
    for init, out, var, target in zip(inits, b.outs(child), child.jaxpr.outvars, carry, strict=True):
        sources = [b.use(b.read(scope, init), init.aval), b.use(out, var.aval)]
        b.edge(sources, target, eqn, times)
        b.depend([target], scope.scalars_of([init]) | child.scalars_of([var]))
    scope.entries[i] = [*consts, *carry]
    child.exits = list(carry)
    b.decide(eqn, carry, b.outs(condition))
    b.bind(scope, eqn, carry)


def cond(b: Builder, scope: Scope, i: int, eqn: Any, times: int) -> None:
    """Adds every branch of a `cond` once; edges tie a result to that of each branch."""
    inputs = [b.read(scope, a) for a in eqn.invars[1:]]
    results = _carry(b, eqn.outvars, eqn)
    scalars = [scope.scalars_of([a]) for a in eqn.invars[1:]]
    sources: list[list[int]] = [[] for _ in results]
    for k, branch in enumerate(eqn.params["branches"]):
        child = b.body(eqn, branch, inputs, times, scalars)
        scope.children[i, "branches", k] = child
        child.exits = list(results)
        for s, result, out, var in zip(sources, results, b.outs(child), child.jaxpr.outvars, strict=True):
            s.append(b.use(out, var.aval))
            b.depend([result], child.scalars_of([var]))
    for s, target in zip(sources, results, strict=True):
        b.edge(s, target, eqn, times)
    b.decide(eqn, results, [b.read(scope, eqn.invars[0])])
    b.bind(scope, eqn, results)


def _enter(b: Builder, atoms: Sequence[Any], targets: Sequence[int], scope: Scope, eqn: Any, times: int) -> None:
    """Adds the edges from outside values to their copies in a loop; after the body, as in Shardy."""
    for atom, target in zip(atoms, targets, strict=True):
        b.edge([b.use(b.read(scope, atom), atom.aval)], target, eqn, times)
        b.depend([target], scope.scalars_of([atom]))


def _carry(b: Builder, atoms: Sequence[Any], eqn: Any) -> list[int]:
    values = [b.value(a.aval, eqn) for a in atoms]
    b.targets.update(values)
    return values


def _drop_lead(rule: Rule | None, *, operand: bool) -> Rule:
    """Returns the rule of a dynamic slice or update of one iteration without the leading dim of size 1."""
    assert rule is not None
    if operand:  # (stack, update) -> stack becomes update -> stack
        operands, results, flow = (rule.operands[1][1:],), rule.results, Flow.BROADCAST
    else:
        operands, results, flow = rule.operands, (rule.results[0][1:],), rule.flow
    return Rule(operands=operands, results=results, sizes=rule.sizes, kinds=rule.kinds, blocked=rule.blocked, flow=flow)
