"""Constraints where values enter and leave a jaxpr: its arguments, results, and the operands of loops and branches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from .. import compat
from ..graph import CALLS, Atom, Op, Scope
from ..spec import Dim, Spec, divisible
from .constraint_emitter import ConstraintEmitter
from .op_strategy import OpStrategies


def argument(emitter: ConstraintEmitter, var: Any, eqn: Any) -> None:
    """Constrains an argument of the jaxpr."""
    program, atom = emitter.program, emitter.scope.env[var]
    spec = program.constraint_spec(atom, var.aval)
    if spec is not None:
        annotation = program.annotations.get(atom) if atom is not None else None
        emitter.replaced[var] = emitter.emit(var, spec, eqn, asked=annotation.spec if annotation else None)


def kept_arguments(
    scope: Scope,
    resharded: Collection[Any],
    strategies: OpStrategies,
    users: Mapping[int, Sequence[Op]],
    carried: Collection[Atom],
    *,
    is_remat: bool,
) -> Iterator[Any]:
    """Arguments of a body that are resharded for some uses; Shardy would give the resharded spec to all.

    Args:
        scope: the body.
        resharded: its resharded variables.
        strategies: how ops run.
        users: value -> the ops that read it.
        carried: values that loops carry and branches return.
        is_remat: whether the body is computed again for the backward pass.
    """
    stacks = zip(scope.jaxpr.invars, scope.stacked_inputs, strict=False)
    rows = {var for var, stacked in stacks if stacked is not None}
    recomputing = (eqn for eqn in scope.jaxpr.eqns if compat.is_recomputed(eqn))
    again = {v for eqn in recomputing for v in eqn.invars if not compat.is_literal(v) and v in rows}
    for var in scope.jaxpr.invars:
        if is_remat or var in again or scope.env[var] in carried:
            if var in resharded or _is_resharded(scope.env[var], strategies, users):
                yield var


def _is_resharded(v: Atom, strategies: OpStrategies, users: Mapping[int, Sequence[Op]]) -> bool:
    """Whether an op reshards a value, also in the branches and loops that it enters."""
    waiting, seen = [] if v is None else [v], {v}
    while waiting:
        u = waiting.pop()
        for op in users.get(u, ()):
            if op.name == "edge":
                (target,) = op.results
                if strategies.specs[target].axes != strategies.specs[u].axes:
                    return True
                waiting += [target] if target not in seen else []
                seen.add(target)
            elif op.rule is not None:
                pairs = zip(op.operands, strategies.of(op).operand_steps, strict=True)
                if any(steps for operand, steps in pairs if operand == u):
                    return True
    return False


def shard_map_argument(emitter: ConstraintEmitter, var: Any, eqn: Any) -> None:
    """Reshards an argument of a `shard_map` body from its sharding outside, before its first use."""
    atom, manual = emitter.scope.env[var], emitter.scope.manual
    op = emitter.program.makers.get(atom) if atom is not None else None
    spec = emitter.var_spec(var)
    if op is None or op.name != "shard_map" or spec is None:
        return
    outside = emitter.program.specs[op.operands[0]]
    have = Spec(dims=tuple(Dim(axes=tuple(a for a in axes if a not in manual)) for axes in outside.axes))
    if have.axes != spec.axes:
        emitter.replaced[var] = emitter.reshard(emitter.emit(var, have, eqn), have, spec, eqn)


def scan_slice(emitter: ConstraintEmitter, var: Any, have: Spec | None, eqn: Any) -> None:
    """Reshards the slice that one iteration reads of a stacked array, from the spec it has there to its own."""
    spec = emitter.var_spec(var)
    if have is not None and spec is not None and have.axes != spec.axes:
        emitter.replaced[var] = emitter.reshard(emitter.emit(var, have, eqn), have, spec, eqn)


def scan_update(emitter: ConstraintEmitter, new: Any, old: Any, stacked: Atom, eqn: Any) -> Any:
    """Reshards the output of one iteration to the spec of the stacked array that it is written to."""
    have, spec = emitter.var_spec(old), _row_spec(emitter, stacked)
    if have is None or spec is None or have.axes == spec.axes:
        return new
    return emitter.reshard(new, have, spec, eqn)


def _row_spec(emitter: ConstraintEmitter, stacked: Atom) -> Spec | None:
    return None if stacked is None else emitter.program.specs[stacked].row


def edge_operand(
    emitter: ConstraintEmitter,
    operand: Any,
    var: Any,
    target: Atom,
    eqn: Any,
    *,
    annotated: bool = False,
    is_output: bool = False,
) -> Any:
    """Reshards an operand to the spec of its edge's target; an output of the program, to the axes that
    divide its dims.

    Emits nothing if the specs are equal, unless `annotated` and the target has an annotation.
    """
    program = emitter.program
    spec = program.constraint_spec(target, var.aval)
    if spec is not None and is_output:
        spec = divisible(spec, var.aval.shape, program.sizes)
    annotation = program.annotations.get(target) if annotated and target is not None else None
    if spec is None or (annotation is None and program.spec(emitter.atom(var)) == spec):
        return operand
    if not compat.is_literal(var) and var in emitter.constants:
        return emitter.emit(emitter.read(emitter.constants[var]), spec, eqn)
    asked, permutes = annotation.spec if annotation else None, target not in program.divergent
    return emitter.reshard(operand, emitter.var_spec(var), spec, eqn, asked=asked, permutes=permutes)


def call_results(emitter: ConstraintEmitter, outvars: Sequence[Any]) -> list[Any]:
    """Constrains the results of a body in manual code that come from a call, whose own results are unconstrained.

    XLA rejects branches of a conditional with different shardings.
    """
    called = {v: eqn for eqn in emitter.scope.jaxpr.eqns if eqn.primitive.name in CALLS for v in eqn.outvars}
    found = []
    for var in outvars:
        spec = emitter.var_spec(var) if not compat.is_literal(var) and var in called else None
        found.append(var if spec is None else emitter.emit(var, spec, called[var]))
    return found
