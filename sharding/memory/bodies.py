"""Loops and branches: their bodies are instructions of their own, and what a loop carries is one place in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from ..graph import Scope
from .emitter import Emitter
from .instruction import Instruction
from .lowering import Env, Lowering


def moved_into(
    low: Lowering, atom: Any, x: Instruction | None, target: int | None, scope: Scope | None, to: Emitter
) -> Instruction:
    """What enters a loop: stored, and split as the loop has it."""
    shape, width = atom.aval.shape, low.width(atom.aval)
    spec = low.specs[target] if target is not None else low.spec_of(atom, scope)
    if x is None:
        return to.constant(to.local(shape, spec), width)
    return to.resplit(x, shape, width, low.spec_of(atom, scope), spec)


def inside(low: Lowering, child: Scope | None) -> Emitter:
    """What adds instructions to a loop's or branch's body."""
    return Emitter(low.sizes, low.place, permutes=child is None or not child.divergent)


def separate(operands: Sequence[Instruction], carried: Sequence[int], to: Emitter) -> list[Instruction]:
    """The operands of a loop with copies of what it changes where that is an argument or there already."""
    seen: set[Instruction] = set()
    found = list(operands)
    for k in carried:
        x = found[k]
        if x.role == "argument" or x in seen or x in to.carried:
            found[k] = to.emit("copy", "library", [x], x.shape, x.width, value=x.value, eqn=x.eqn)
        seen.add(x)
    to.carried |= seen
    return found


def scan(low: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, to: Emitter) -> None:
    """A loop whose stacks are read by slices and made by updates in place."""
    n_consts, n_carry = compat.scan_parts(eqn.params)
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    child = scope.children.get((i, "jaxpr", 0)) if scope is not None else None
    entries = scope.entries[i] if scope is not None and i in scope.entries else [None] * len(eqn.invars)
    entered = [
        moved_into(low, atom, low.read(atom, env), target, scope, to)
        for atom, target in zip(eqn.invars, entries, strict=True)
    ]
    inner = inside(low, child)
    names: Env = dict.fromkeys(body.constvars)
    for k, (var, x) in enumerate(zip(body.invars, entered, strict=True)):
        width = low.width(var.aval)
        own = inner.argument(x.shape, width, x.value)
        if k >= n_consts + n_carry:
            sliced = inner.emit(
                "dynamic_slice", "loop", [own], x.shape[1:], width, value=low.value(var, child), eqn=eqn
            )
            have = low.spec_of(eqn.invars[k], scope).row
            own = inner.resplit(sliced, var.aval.shape, width, have, low.spec_of(var, child))
        names[var] = own
    low.equations(body, child, names, inner)
    results, stacks, made = [], [], [eqn] * len(eqn.outvars)
    for k, (atom, var) in enumerate(zip(body.outvars, eqn.outvars, strict=True)):
        width = low.width(atom.aval)
        x = low.read(atom, names)
        if k < n_carry:
            target = low.specs[goes] if (goes := entries[n_consts + k]) is not None else low.spec_of(atom, child)
            x = inner.constant(inner.local(atom.aval.shape, target), width) if x is None else inner.resplit(
                x, atom.aval.shape, width, low.spec_of(atom, child), target)  # fmt: skip
            results.append(x)
            continue
        if compat.is_drop(var):
            continue
        want = low.spec_of(var, scope)
        shape = to.local(var.aval.shape, want)
        stack = to.constant(shape, width)
        stacks.append((k, stack))
        own = inner.argument(shape, width, low.value(var, scope))
        made[k] = x.eqn if x is not None and x.eqn is not None else eqn
        row = [] if x is None else [inner.resplit(x, atom.aval.shape, width, low.spec_of(atom, child), want.row)]
        results.append(
            inner.emit("dynamic_update_slice", "loop", [own, *row], shape, width, value=low.value(var, scope), eqn=eqn,
                       in_place=((0, 0),))
        )  # fmt: skip
    inner.body.results = results
    read = {x for one in inner.body.needed() for x in (one, *one.operands)}
    fixed = [k for k in range(len(entered)) if not n_consts <= k < n_consts + n_carry]
    dead = {k for k in fixed if inner.body.arguments[k] not in read}
    alive = [k for k in range(len(entered)) if k not in dead]
    inner.body.arguments = [inner.body.arguments[k] for k in alive] + inner.body.arguments[len(entered) :]
    operands = [*(entered[k] for k in alive), *(stack for _, stack in stacks)]
    firsts = [k for k, was in enumerate(alive) if was not in fixed] + list(range(len(alive), len(operands)))
    operands = separate(operands, firsts, to)
    whole = to.emit("scan", "library", operands, (0,), 1, eqn=eqn, bodies=(inner.body,))
    whole.in_place = tuple((at, k) for k, at in enumerate(firsts))
    kept = [*range(n_carry), *(k for k, _ in stacks)]
    facts = [
        (operands[at].shape, low.width(eqn.outvars[k].aval), low.value(eqn.outvars[k], scope), made[k])
        for at, k in zip(firsts, kept, strict=True)
    ]
    low.bind([eqn.outvars[k] for k in kept], to.parts(whole, facts), env)


def while_(low: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, to: Emitter) -> None:
    """A loop that carries values."""
    p = eqn.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    entries = scope.entries[i] if scope is not None and i in scope.entries else [None] * len(eqn.invars)
    entered = [
        moved_into(low, atom, low.read(atom, env), target, scope, to)
        for atom, target in zip(eqn.invars, entries, strict=True)
    ]
    body = compat.open_jaxpr(p["body_jaxpr"])
    child = scope.children.get((i, "body_jaxpr", 0)) if scope is not None else None
    inner = inside(low, child)
    names: Env = dict.fromkeys(body.constvars)
    for var, x in zip(body.invars, entered[n_cond:], strict=True):
        names[var] = inner.argument(x.shape, low.width(var.aval), x.value)
    low.equations(body, child, names, inner)
    first = n_cond + n_body
    for k, atom in enumerate(body.outvars):
        x, target = low.read(atom, names), entries[first + k]
        spec = low.specs[target] if target is not None else low.spec_of(atom, child)
        shape, width = atom.aval.shape, low.width(atom.aval)
        inner.body.results.append(
            inner.constant(inner.local(shape, spec), width) if x is None
            else inner.resplit(x, shape, width, low.spec_of(atom, child), spec)
        )  # fmt: skip
    entered = separate(entered, range(first, len(entered)), to)
    whole = to.emit("while", "library", entered, (0,), 1, eqn=eqn, bodies=(inner.body,))
    whole.in_place = tuple((first + k, k) for k in range(len(eqn.outvars)))
    facts = [(entered[first + k].shape, low.width(v.aval), low.value(v, scope), eqn) for k, v in enumerate(eqn.outvars)]
    low.bind(eqn.outvars, to.parts(whole, facts), env)


def cond(low: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, to: Emitter) -> None:
    """Branches, of which one runs."""
    entered = [
        x
        if (x := low.read(atom, env)) is not None
        else to.constant(to.local(atom.aval.shape, low.spec_of(atom, scope)), low.width(atom.aval))
        for atom in eqn.invars
    ]
    bodies = []
    wants = [low.spec_of(v, scope) for v in eqn.outvars]
    for k, branch in enumerate(eqn.params["branches"]):
        jaxpr = compat.open_jaxpr(branch)
        child = scope.children.get((i, "branches", k)) if scope is not None else None
        inner = inside(low, child)
        names: Env = dict.fromkeys(jaxpr.constvars)
        for var, x in zip(jaxpr.invars, entered[1:], strict=True):
            names[var] = inner.argument(x.shape, low.width(var.aval), x.value)
        low.equations(jaxpr, child, names, inner)
        for atom, want in zip(jaxpr.outvars, wants, strict=True):
            x, shape, width = low.read(atom, names), atom.aval.shape, low.width(atom.aval)
            inner.body.results.append(
                inner.constant(inner.local(shape, want), width) if x is None
                else inner.resplit(x, shape, width, low.spec_of(atom, child), want)
            )  # fmt: skip
        bodies.append(inner.body)
    whole = to.emit("cond", "library", entered, (0,), 1, eqn=eqn, bodies=tuple(bodies))
    facts = [
        (to.local(v.aval.shape, want), low.width(v.aval), None if compat.is_drop(v) else low.value(v, scope), eqn)
        for v, want in zip(eqn.outvars, wants, strict=True)
    ]
    low.bind(eqn.outvars, to.parts(whole, facts), env)


def shard_map(low: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, to: Emitter) -> None:
    """A body on each device's part, in place."""
    if scope is None or i not in scope.entries:
        low.plain(eqn, scope, env, to)
        return
    entered: list[Instruction | None] = []
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    child = scope.children.get((i, "jaxpr", 0))
    for atom, target, var in zip(eqn.invars, scope.entries[i], body.invars, strict=True):
        x = low.read(atom, env)
        if x is not None:
            x = moved_into(low, atom, x, target, scope, to)
            have = low.spec_of(var, child)
            shape = to.local(var.aval.shape, have)
            if x.shape != shape:
                x = to.emit("slice", "loop", [x], shape, low.width(var.aval), value=x.value, eqn=eqn)
        entered.append(x)
    low.bind(eqn.outvars, low.inlined(body, child, entered, to), env)


def linear_solve(low: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, to: Emitter) -> None:
    """The body that solves."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first, num_consts = lengths.matvec + lengths.vecmat, sum(lengths)
    child = scope.children.get((i, "jaxprs", jaxprs.index(jaxprs.solve))) if scope is not None else None
    atoms = [*eqn.invars[first : first + lengths.solve], *eqn.invars[num_consts:]]
    operands = [low.read(a, env) for a in atoms]
    low.bind(eqn.outvars, low.inlined(jaxprs.solve, child, operands, to), env)
