"""Loops and branches: bodies appear once, tied by edges to what enters and leaves them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import compat
from ..divergence import rounds_of
from ..rules import Flow, Rule, rule_for
from .builder import Builder
from .graph import Scope


def scan(b: Builder, scope: Scope, i: int, eqn: Any, times: int) -> None:
    """The body once; constants, carried values and stacks by edges, slices of stacks by ops of the body.

    The edges come behind the body, stacks that are read first and those that are made last: Shardy has them so, and
    where claims meet the order decides.
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
    child = b.scope(body, [*consts, *carry, *xs], times * length)
    scope.children[i, "jaxpr", 0] = child
    outs = [b.use(a, v.aval) for a, v in zip(b.outs(child), body.outvars, strict=True)]
    made = [
        _update(b, out, var, eqn, times * length)
        for out, var in zip(outs[n_carry:], eqn.outvars[n_carry:], strict=True)
    ]
    _enter(b, eqn.invars[n_consts + n_carry :], stacks, scope, eqn, times)
    _enter(b, eqn.invars[:n_consts], consts, scope, eqn, times)
    for init, out, target in zip(inits, outs, carry, strict=False):
        b.edge([b.use(b.read(scope, init), init.aval), out], target, eqn, times)
    ys = _carry(b, eqn.outvars[n_carry:], eqn)
    for one, y in zip(made, ys, strict=True):
        b.edge([one], y, eqn, times)
    scope.entries[i] = [*consts, *carry, *[None] * len(xs)]
    child.exits = [*carry, *[None] * len(ys)]
    child.read = [*[None] * (n_consts + n_carry), *stacks]
    child.added = [*[None] * n_carry, *made]
    b.bind(scope, eqn, [*carry, *ys])


def _slice(b: Builder, stack: int, var: Any, eqn: Any, times: int) -> int:
    """What one step reads of a stack."""
    x, shape = b.value(var.aval, eqn), b.graph.shapes[stack]
    rule = rule_for("dynamic_slice", [shape], [(1, *var.aval.shape)], {})
    b.op("scan xs", [stack], [x], _drop_lead(rule, operand=False), eqn, times)
    return x


def _update(b: Builder, out: int, var: Any, eqn: Any, times: int) -> int:
    """The stack after one step has added to it."""
    stack, shape = b.value(var.aval, eqn), var.aval.shape
    rule = rule_for("dynamic_update_slice", [shape, (1, *b.graph.shapes[out])], [shape], {})
    b.op("scan ys", [out], [stack], _drop_lead(rule, operand=True), eqn, times)
    return stack


def while_(b: Builder, scope: Scope, i: int, eqn: Any, times: int) -> None:
    """Condition and body once; constants and carried values by edges.

    The body counts as often as the program says that it runs (``divergence.rounds``), else as if it ran once.
    """
    p = eqn.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    consts = _carry(b, eqn.invars[: n_cond + n_body], eqn)
    inits = eqn.invars[n_cond + n_body :]
    carry = _carry(b, inits, eqn)
    scope.children[i, "cond_jaxpr", 0] = b.scope(p["cond_jaxpr"], [*consts[:n_cond], *carry], times)
    rounds = math.ceil(times * (rounds_of(compat.name_stack(eqn)) or 1))
    child = b.scope(p["body_jaxpr"], [*consts[n_cond:], *carry], rounds)
    scope.children[i, "body_jaxpr", 0] = child
    _enter(b, eqn.invars[: n_cond + n_body], consts, scope, eqn, times)
    for init, out, var, target in zip(inits, b.outs(child), child.jaxpr.outvars, carry, strict=True):
        sources = [b.use(b.read(scope, init), init.aval), b.use(out, var.aval)]
        b.edge(sources, target, eqn, times)
    scope.entries[i] = [*consts, *carry]
    child.exits = list(carry)
    b.bind(scope, eqn, carry)


def cond(b: Builder, scope: Scope, i: int, eqn: Any, times: int) -> None:
    """Every branch once; a result is tied to what each branch returns."""
    inputs = [b.read(scope, a) for a in eqn.invars[1:]]
    results = _carry(b, eqn.outvars, eqn)
    sources: list[list[int]] = [[] for _ in results]
    for k, branch in enumerate(eqn.params["branches"]):
        child = b.scope(branch, inputs, times)
        scope.children[i, "branches", k] = child
        child.exits = list(results)
        for s, out, var in zip(sources, b.outs(child), child.jaxpr.outvars, strict=True):
            s.append(b.use(out, var.aval))
    for s, target in zip(sources, results, strict=True):
        b.edge(s, target, eqn, times)
    b.bind(scope, eqn, results)


def _enter(b: Builder, atoms: Sequence[Any], targets: Sequence[int], scope: Scope, eqn: Any, times: int) -> None:
    """Ties a loop's own copies of values from outside to those; behind the body, where Shardy has its edges."""
    for atom, target in zip(atoms, targets, strict=True):
        b.edge([b.use(b.read(scope, atom), atom.aval)], target, eqn, times)


def _carry(b: Builder, atoms: Sequence[Any], eqn: Any) -> list[int]:
    values = [b.value(a.aval, eqn) for a in atoms]
    b.targets.update(values)
    return values


def _drop_lead(rule: Rule | None, *, operand: bool) -> Rule:
    """The rule of a loop's slice: a dynamic slice or update of one step, without the leading dim of size 1."""
    assert rule is not None
    if operand:  # (stack, update) -> stack becomes update -> stack
        operands, results, flow = (rule.operands[1][1:],), rule.results, Flow.BROADCAST
    else:
        operands, results, flow = rule.operands, (rule.results[0][1:],), rule.flow
    return Rule(operands=operands, results=results, sizes=rule.sizes, kinds=rule.kinds, blocked=rule.blocked, flow=flow)
