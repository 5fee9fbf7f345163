"""Lowering of control flow: loop bodies and branches become nested bodies, and loop carries are updated in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import compat
from ..graph import Scope
from ..rewrite.scanned_stacks import scanned_spec
from ..spec import Spec
from .emitter import Emitter
from .equation_lowering import Env, Lowering
from .instruction import Body, Instruction


def loop_operands(
    lowering: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter
) -> tuple[list[Instruction], Sequence[int | None]]:
    """The operands of a loop, and the graph's numbers of the loop's inputs."""
    entries = scope.entries[i] if scope is not None and i in scope.entries else [None] * len(eqn.invars)
    pairs = zip(eqn.invars, entries, strict=True)
    return [stored(lowering, atom, env, scope, target, emitter) for atom, target in pairs], entries


def stored(
    lowering: Lowering, atom: Any, env: Env, scope: Scope | None, need: int | Spec | None, emitter: Emitter
) -> Instruction:
    """An operand or result of a body, in memory, resharded to a spec or to that of a value, and rounded as that is."""
    shape, itemsize = atom.aval.shape, lowering.itemsize(atom.aval)
    x, have = lowering.read(atom, env), lowering.spec_of(atom, scope)
    value = need if isinstance(need, int) else None
    spec = lowering.specs[need] if isinstance(need, int) else need or have
    if x is None:
        return emitter.constant(emitter.local_shape(shape, spec), emitter.stored_itemsize(itemsize, value))
    x = emitter.reshard(x, shape, itemsize, have, spec)
    return emitter.stored_as(x, value)


Rows = Mapping[int, Spec]
"""Stacked input, of which a body reads a row -> the spec of the row."""


def lower_body(
    lowering: Lowering,
    eqn: Any,
    jaxpr: Any,
    child: Scope | None,
    inputs: Sequence[Instruction],
    rows: Mapping[int, Spec],
) -> tuple[Emitter, Env]:
    """The emitter and environment of a body whose arguments are as its inputs.

    Args:
        rows: stacked inputs, of which the body reads a row -> the spec of that.
    """
    permutes = child is None or not child.divergent
    inner = Emitter(lowering.sizes, lowering.cursor, lowering.traits, permutes=permutes)
    env: Env = dict.fromkeys(jaxpr.constvars)
    for k, (var, x) in enumerate(zip(jaxpr.invars, inputs, strict=True)):
        itemsize = lowering.itemsize(var.aval)
        element = inner.argument(x.shape, x.itemsize, x.value)
        if k in rows:
            value = lowering.graph_value(var, child)
            element = inner.emit("dynamic_slice", "fusible", [element], x.shape[1:], itemsize, value=value, eqn=eqn)
            element = inner.reshard(element, var.aval.shape, itemsize, rows[k], lowering.spec_of(var, child))
        env[var] = element
    lowering.lower_equations(jaxpr, child, env, inner)
    return inner, env


def emit_loop(
    lowering: Lowering,
    eqn: Any,
    operands: Sequence[Instruction],
    carried: Sequence[int],
    outputs: Sequence[tuple[int, Any]],
    scope: Scope | None,
    body: Body,
    emitter: Emitter,
) -> tuple[list[Any], list[Instruction]]:
    """The variables and results of a loop that updates some of its operands in place.

    Args:
        carried: indices of those operands; a copy is carried where one is an argument or already carried.
        outputs: per carried operand the index of the equation's result, and the equation that makes it.
    """
    inputs = list(operands)
    for k in carried:
        inputs[k] = emitter.owned(inputs[k])
    loop = emitter.emit(eqn.primitive.name, "unfusible", inputs, (0,), 1, eqn=eqn, bodies=(body,))
    loop.in_place = tuple((at, k) for k, at in enumerate(carried))
    variables = [eqn.outvars[k] for k, _ in outputs]
    return variables, emitter.tuple_elements(
        loop,
        [
            (inputs[at].shape, lowering.itemsize(var.aval), lowering.graph_value(var, scope), made)
            for at, var, (_, made) in zip(carried, variables, outputs, strict=True)
        ],
    )


def scan(lowering: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
    """Lower a scan: stacked inputs are read by dynamic slices, stacked outputs written by in-place updates."""
    n_consts, n_carry = compat.scan_parts(eqn.params)
    first_stacked = n_consts + n_carry
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    child = scope.children.get((i, "jaxpr", 0)) if scope is not None else None
    inputs, entries = loop_operands(lowering, i, eqn, scope, env, emitter)
    if first_stacked == len(inputs) == n_consts + len(eqn.outvars) and eqn.params["length"] <= eqn.params["unroll"]:
        lowering.bind(eqn.outvars, _unrolled(lowering, eqn, body, child, inputs, entries, emitter), env)
        return
    rows: dict[int, Spec] = {}
    for k in range(first_stacked, len(inputs)):
        inputs[k], rows[k] = _scanned(lowering, eqn.invars[k], inputs[k], k, scope, child, emitter)
        inputs[k] = emitter.stored_as(inputs[k], lowering.graph_value(body.invars[k], child))
    inner, inner_env = lower_body(lowering, eqn, body, child, inputs, rows)
    stacks: list[Instruction] = []
    outputs: list[tuple[int, Any]] = [(k, eqn) for k in range(n_carry)]
    results = [
        stored(lowering, body.outvars[k], inner_env, child, entries[n_consts + k], inner) for k in range(n_carry)
    ]
    for k, (atom, var) in enumerate(zip(body.outvars, eqn.outvars, strict=True)):
        if k < n_carry or compat.is_drop(var):
            continue
        want, itemsize = _stacked_spec(lowering, var, k, scope, child), lowering.itemsize(atom.aval)
        shape, value = emitter.local_shape(var.aval.shape, want), lowering.graph_value(var, scope)
        stacks.append(emitter.constant(shape, emitter.stored_itemsize(itemsize, value)))
        x = lowering.read(atom, inner_env)
        outputs.append((k, x.eqn if x is not None and x.eqn is not None else eqn))
        row = [] if x is None else [stored(lowering, atom, inner_env, child, want.row, inner)]
        carry = inner.argument(shape, itemsize, value)
        facts: dict[str, Any] = {"value": value, "eqn": eqn, "in_place": ((0, 0),)}
        results.append(inner.emit("dynamic_update_slice", "fusible", [carry, *row], shape, itemsize, **facts))
    inner.body.results = results
    operands = [*inputs, *stacks]
    carried = [*range(n_consts, first_stacked), *range(len(inputs), len(operands))]
    variables, made = emit_loop(lowering, eqn, operands, carried, outputs, scope, inner.body, emitter)
    for at, (var, (k, _)) in enumerate(zip(variables, outputs, strict=True)):
        if k >= n_carry:
            inside, behind = _stacked_spec(lowering, var, k, scope, child), lowering.spec_of(var, scope)
            made[at] = emitter.reshard(made[at], var.aval.shape, lowering.itemsize(var.aval), inside, behind)
    lowering.bind(variables, made, env)


def _scanned(
    lowering: Lowering, var: Any, x: Instruction, k: int, scope: Scope | None, child: Scope | None, emitter: Emitter
) -> tuple[Instruction, Spec]:
    """The k-th operand of a scan, which is sliced, resharded to what its slices need, and the spec of a slice."""
    have = lowering.spec_of(var, scope)
    stack = child.stacked_inputs[k] if child is not None and child.stacked_inputs else None
    if stack is None:
        return x, have.row
    need = scanned_spec(lowering.strategies, stack)
    return emitter.reshard(x, var.aval.shape, lowering.itemsize(var.aval), have, need), need.row


def _stacked_spec(lowering: Lowering, var: Any, k: int, scope: Scope | None, child: Scope | None) -> Spec:
    """The spec in the loop of the k-th result of a scan, which is stacked."""
    stack = child.stacked_outputs[k] if child is not None and child.stacked_outputs else None
    return lowering.spec_of(var, scope) if stack is None else lowering.specs[stack]


def _unrolled(
    lowering: Lowering,
    eqn: Any,
    body: Any,
    child: Scope | None,
    inputs: Sequence[Instruction],
    entries: Sequence[int | None],
    emitter: Emitter,
) -> list[Instruction]:
    """What a scan of values that are only carried computes without a loop: JAX lowers it to none."""
    n_consts, _ = compat.scan_parts(eqn.params)
    consts, carry = inputs[:n_consts], [*inputs[n_consts:]]
    for _ in range(eqn.params["length"]):
        inner: Env = dict.fromkeys(body.constvars)
        inner.update(zip(body.invars, [*consts, *carry], strict=True))
        lowering.lower_equations(body, child, inner, emitter)
        pairs = zip(body.outvars, entries[n_consts:], strict=True)
        carry = [stored(lowering, atom, inner, child, target, emitter) for atom, target in pairs]
    return carry


def while_(lowering: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
    """Lower a while loop; the condition is left out."""
    n_cond, first = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    body = compat.open_jaxpr(eqn.params["body_jaxpr"])
    child = scope.children.get((i, "body_jaxpr", 0)) if scope is not None else None
    inputs, entries = loop_operands(lowering, i, eqn, scope, env, emitter)
    inner, inner_env = lower_body(lowering, eqn, body, child, inputs[n_cond:], {})
    pairs = zip(body.outvars, entries[first:], strict=True)
    inner.body.results = [stored(lowering, atom, inner_env, child, target, inner) for atom, target in pairs]
    carried, outputs = range(first, len(inputs)), [(k, eqn) for k in range(len(eqn.outvars))]
    lowering.bind(*emit_loop(lowering, eqn, inputs, carried, outputs, scope, inner.body, emitter), env)


def cond(lowering: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
    """Lower a conditional, one body per branch."""
    inputs = [stored(lowering, atom, env, scope, None, emitter) for atom in eqn.invars]
    wants = [lowering.spec_of(v, scope) for v in eqn.outvars]
    bodies = []
    for k, branch in enumerate(eqn.params["branches"]):
        jaxpr = compat.open_jaxpr(branch)
        child = scope.children.get((i, "branches", k)) if scope is not None else None
        inner, inner_env = lower_body(lowering, eqn, jaxpr, child, inputs[1:], {})
        pairs = zip(jaxpr.outvars, wants, strict=True)
        inner.body.results = [stored(lowering, atom, inner_env, child, want, inner) for atom, want in pairs]
        bodies.append(inner.body)
    conditional = emitter.emit("cond", "unfusible", inputs, (0,), 1, eqn=eqn, bodies=tuple(bodies))
    elements = [
        (x.shape, x.itemsize, lowering.graph_value(v, scope), eqn)
        for v, x in zip(eqn.outvars, bodies[0].results, strict=True)
    ]
    lowering.bind(eqn.outvars, emitter.tuple_elements(conditional, elements), env)


def shard_map(lowering: Lowering, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
    """Lower a `shard_map` by inlining its body on local shapes."""
    if scope is None or i not in scope.entries:
        lowering.lower_equation(lowering.equations.facts(i, eqn, scope), scope, env, emitter)
        return
    inputs: list[Instruction | None] = []
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    child = scope.children.get((i, "jaxpr", 0))
    for atom, target, var in zip(eqn.invars, scope.entries[i], body.invars, strict=True):
        x = lowering.read(atom, env)
        if x is not None:
            x = stored(lowering, atom, env, scope, target, emitter)
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
