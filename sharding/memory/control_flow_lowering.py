"""Lowering of control flow: loop bodies and branches become nested bodies, and loop carries are updated in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from ..graph import Scope
from .emitter import Emitter
from .equation_lowering import Env, Lowering
from .instruction import Instruction


def loop_operand(
    lowering: Lowering, atom: Any, x: Instruction | None, target: int | None, scope: Scope | None, emitter: Emitter
) -> Instruction:
    """An operand of a loop, stored and resharded to the spec of the loop's input."""
    shape, itemsize = atom.aval.shape, lowering.itemsize(atom.aval)
    spec = lowering.specs[target] if target is not None else lowering.spec_of(atom, scope)
    if x is None:
        return emitter.constant(emitter.local_shape(shape, spec), itemsize)
    if x.name == "transpose" and x.role == "bitcast":  # a loop has its operands in row-major layout
        x = emitter.emit(x.name, "fusible", x.operands, x.shape, itemsize, key=id(x), value=x.value, eqn=x.eqn)
    return emitter.reshard(x, shape, itemsize, lowering.spec_of(atom, scope), spec)


def body_emitter(lowering: Lowering, child: Scope | None) -> Emitter:
    """The emitter of a loop body or branch."""
    return Emitter(lowering.sizes, lowering.cursor, lowering.traits, permutes=child is None or not child.divergent)


def copy_carried(operands: Sequence[Instruction], carried: Sequence[int], emitter: Emitter) -> list[Instruction]:
    """The operands of a loop, with a copy of each carry that is an argument or already carried."""
    seen: set[Instruction] = set()
    found = list(operands)
    for k in carried:
        x = found[k]
        if x.role == "argument" or x in seen or x in emitter.carried:
            found[k] = emitter.emit("copy", "unfusible", [x], x.shape, x.itemsize, value=x.value, eqn=x.eqn)
        seen.add(x)
    emitter.carried |= seen
    return found


def scan(lowering: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
    """Lower a scan: stacked inputs are read by dynamic slices, stacked outputs written by in-place updates."""
    n_consts, n_carry = compat.scan_parts(eqn.params)
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    child = scope.children.get((i, "jaxpr", 0)) if scope is not None else None
    entries = scope.entries[i] if scope is not None and i in scope.entries else [None] * len(eqn.invars)
    inputs = [
        loop_operand(lowering, atom, lowering.read(atom, env), target, scope, emitter)
        for atom, target in zip(eqn.invars, entries, strict=True)
    ]
    inner = body_emitter(lowering, child)
    inner_env: Env = dict.fromkeys(body.constvars)
    for k, (var, x) in enumerate(zip(body.invars, inputs, strict=True)):
        itemsize = lowering.itemsize(var.aval)
        element = inner.argument(x.shape, itemsize, x.value)
        if k >= n_consts + n_carry:
            sliced = inner.emit(
                "dynamic_slice",
                "fusible",
                [element],
                x.shape[1:],
                itemsize,
                value=lowering.graph_value(var, child),
                eqn=eqn,
            )
            have = lowering.spec_of(eqn.invars[k], scope).row
            element = inner.reshard(sliced, var.aval.shape, itemsize, have, lowering.spec_of(var, child))
        inner_env[var] = element
    lowering.lower_equations(body, child, inner_env, inner)
    results, stacks, made = [], [], [eqn] * len(eqn.outvars)
    for k, (atom, var) in enumerate(zip(body.outvars, eqn.outvars, strict=True)):
        itemsize = lowering.itemsize(atom.aval)
        x = lowering.read(atom, inner_env)
        if k < n_carry:
            entry = entries[n_consts + k]
            target = lowering.specs[entry] if entry is not None else lowering.spec_of(atom, child)
            x = inner.constant(inner.local_shape(atom.aval.shape, target), itemsize) if x is None else inner.reshard(
                x, atom.aval.shape, itemsize, lowering.spec_of(atom, child), target)  # fmt: skip
            results.append(x)
            continue
        if compat.is_drop(var):
            continue
        want = lowering.spec_of(var, scope)
        shape = emitter.local_shape(var.aval.shape, want)
        stack = emitter.constant(shape, itemsize)
        stacks.append((k, stack))
        value = lowering.graph_value(var, scope)
        carry = inner.argument(shape, itemsize, value)
        made[k] = x.eqn if x is not None and x.eqn is not None else eqn
        row = (
            [] if x is None else [inner.reshard(x, atom.aval.shape, itemsize, lowering.spec_of(atom, child), want.row)]
        )
        results.append(
            inner.emit("dynamic_update_slice", "fusible", [carry, *row], shape, itemsize, value=value, eqn=eqn,
                       in_place=((0, 0),))
        )  # fmt: skip
    inner.body.results = results
    read = {x for one in inner.body.live_instructions() for x in (one, *one.operands)}
    uncarried = [k for k in range(len(inputs)) if not n_consts <= k < n_consts + n_carry]
    dead = {k for k in uncarried if inner.body.arguments[k] not in read}
    alive = [k for k in range(len(inputs)) if k not in dead]
    inner.body.arguments = [inner.body.arguments[k] for k in alive] + inner.body.arguments[len(inputs) :]
    operands = [*(inputs[k] for k in alive), *(stack for _, stack in stacks)]
    carried = [k for k, number in enumerate(alive) if number not in uncarried] + list(range(len(alive), len(operands)))
    operands = copy_carried(operands, carried, emitter)
    loop = emitter.emit("scan", "unfusible", operands, (0,), 1, eqn=eqn, bodies=(inner.body,))
    loop.in_place = tuple((at, k) for k, at in enumerate(carried))
    outputs = [*range(n_carry), *(k for k, _ in stacks)]
    elements = [
        (
            operands[at].shape,
            lowering.itemsize(eqn.outvars[k].aval),
            lowering.graph_value(eqn.outvars[k], scope),
            made[k],
        )
        for at, k in zip(carried, outputs, strict=True)
    ]
    lowering.bind([eqn.outvars[k] for k in outputs], emitter.tuple_elements(loop, elements), env)


def while_(lowering: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
    """Lower a while loop; the condition is left out."""
    p = eqn.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    entries = scope.entries[i] if scope is not None and i in scope.entries else [None] * len(eqn.invars)
    inputs = [
        loop_operand(lowering, atom, lowering.read(atom, env), target, scope, emitter)
        for atom, target in zip(eqn.invars, entries, strict=True)
    ]
    body = compat.open_jaxpr(p["body_jaxpr"])
    child = scope.children.get((i, "body_jaxpr", 0)) if scope is not None else None
    inner = body_emitter(lowering, child)
    inner_env: Env = dict.fromkeys(body.constvars)
    for var, x in zip(body.invars, inputs[n_cond:], strict=True):
        inner_env[var] = inner.argument(x.shape, lowering.itemsize(var.aval), x.value)
    lowering.lower_equations(body, child, inner_env, inner)
    first = n_cond + n_body
    for k, atom in enumerate(body.outvars):
        x, target = lowering.read(atom, inner_env), entries[first + k]
        spec = lowering.specs[target] if target is not None else lowering.spec_of(atom, child)
        shape, itemsize = atom.aval.shape, lowering.itemsize(atom.aval)
        inner.body.results.append(
            inner.constant(inner.local_shape(shape, spec), itemsize) if x is None
            else inner.reshard(x, shape, itemsize, lowering.spec_of(atom, child), spec)
        )  # fmt: skip
    inputs = copy_carried(inputs, range(first, len(inputs)), emitter)
    loop = emitter.emit("while", "unfusible", inputs, (0,), 1, eqn=eqn, bodies=(inner.body,))
    loop.in_place = tuple((first + k, k) for k in range(len(eqn.outvars)))
    elements = [
        (inputs[first + k].shape, lowering.itemsize(v.aval), lowering.graph_value(v, scope), eqn)
        for k, v in enumerate(eqn.outvars)
    ]
    lowering.bind(eqn.outvars, emitter.tuple_elements(loop, elements), env)


def cond(lowering: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
    """Lower a conditional, one body per branch."""
    inputs = [
        x
        if (x := lowering.read(atom, env)) is not None
        else emitter.constant(
            emitter.local_shape(atom.aval.shape, lowering.spec_of(atom, scope)), lowering.itemsize(atom.aval)
        )
        for atom in eqn.invars
    ]
    bodies = []
    wants = [lowering.spec_of(v, scope) for v in eqn.outvars]
    for k, branch in enumerate(eqn.params["branches"]):
        jaxpr = compat.open_jaxpr(branch)
        child = scope.children.get((i, "branches", k)) if scope is not None else None
        inner = body_emitter(lowering, child)
        inner_env: Env = dict.fromkeys(jaxpr.constvars)
        for var, x in zip(jaxpr.invars, inputs[1:], strict=True):
            inner_env[var] = inner.argument(x.shape, lowering.itemsize(var.aval), x.value)
        lowering.lower_equations(jaxpr, child, inner_env, inner)
        for atom, want in zip(jaxpr.outvars, wants, strict=True):
            x, shape, itemsize = lowering.read(atom, inner_env), atom.aval.shape, lowering.itemsize(atom.aval)
            inner.body.results.append(
                inner.constant(inner.local_shape(shape, want), itemsize) if x is None
                else inner.reshard(x, shape, itemsize, lowering.spec_of(atom, child), want)
            )  # fmt: skip
        bodies.append(inner.body)
    conditional = emitter.emit("cond", "unfusible", inputs, (0,), 1, eqn=eqn, bodies=tuple(bodies))
    elements = [
        (
            emitter.local_shape(v.aval.shape, want),
            lowering.itemsize(v.aval),
            None if compat.is_drop(v) else lowering.graph_value(v, scope),
            eqn,
        )
        for v, want in zip(eqn.outvars, wants, strict=True)
    ]
    lowering.bind(eqn.outvars, emitter.tuple_elements(conditional, elements), env)


def shard_map(lowering: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
    """Lower a `shard_map` by inlining its body on local shapes."""
    if scope is None or i not in scope.entries:
        lowering.lower_equation(eqn, scope, env, emitter)
        return
    inputs: list[Instruction | None] = []
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    child = scope.children.get((i, "jaxpr", 0))
    for atom, target, var in zip(eqn.invars, scope.entries[i], body.invars, strict=True):
        x = lowering.read(atom, env)
        if x is not None:
            x = loop_operand(lowering, atom, x, target, scope, emitter)
            have = lowering.spec_of(var, child)
            shape = emitter.local_shape(var.aval.shape, have)
            if x.shape != shape:
                x = emitter.emit("slice", "fusible", [x], shape, lowering.itemsize(var.aval), value=x.value, eqn=eqn)
        inputs.append(x)
    lowering.bind(eqn.outvars, lowering.inline(body, child, inputs, emitter), env)


def linear_solve(lowering: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
    """Lower a `custom_linear_solve` by inlining its `solve` body."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first, num_consts = lengths.matvec + lengths.vecmat, sum(lengths)
    child = scope.children.get((i, "jaxprs", jaxprs.index(jaxprs.solve))) if scope is not None else None
    atoms = [*eqn.invars[first : first + lengths.solve], *eqn.invars[num_consts:]]
    operands = [lowering.read(a, env) for a in atoms]
    lowering.bind(eqn.outvars, lowering.inline(jaxprs.solve, child, operands, emitter), env)
