"""The rewriter: a program and an `Assignment` in, the same program with every value's split decided out.

The jaxpr is rewritten in place: behind each equation comes a constraint on each of its results, in nested jaxprs
too, which go back into their own equations with all other parameters untouched. So remat stays remat, custom
derivatives keep their rules, effects keep their order. Constraining every value compiles to the program that XLA
would have made from the same shardings, and leaves it nothing to decide. Values that their neighbours settle
(`settled.py`) go without.

Somewhat longer than other files: what is told of operands, of results and at a body's edges shares one body's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from . import annotation, compat, limits
from .barrier import barrier_p
from .decision import EXCHANGED, Decision, Decisions
from .graph import CALLS, Atom, Op, Scope
from .group import same_p
from .halo import of_rotation, rotation, rotation_back
from .propagation import Assignment
from .refined import refine
from .reshard import Step, chain
from .settled import settled
from .spec import Dim, Spec, indivisible


def constrain(closed_jaxpr: Any, assignment: Assignment, mesh: AbstractMesh, *, inputs: bool = False) -> Any:
    """A closed jaxpr of the same type whose values are split as `assignment` says.

    Args:
        closed_jaxpr: the program that the assignment's graph was built from.
        assignment: a spec per value.
        mesh: what the specs' axes are axes of.
        inputs: constrain the arguments too, for a program that runs inside another one.
    """
    assert assignment.graph.scope is not None
    rewriter = _Rewriter(assignment, mesh)
    return rewriter.jaxpr(closed_jaxpr, assignment.graph.scope, inputs=inputs)


class _Rewriter:
    def __init__(self, assignment: Assignment, mesh: AbstractMesh):
        self.specs = assignment.specs
        self.pins = assignment.graph.pins
        self.sizes = assignment.sizes
        self.program = assignment.graph.scope
        self.mesh = mesh
        self.makers = assignment.graph.makers
        self.divergent = assignment.graph.divergent
        turns = (op for op in assignment.graph.ops if not assignment.graph.diverges(op))
        self.turning = {v for op in turns for part in of_rotation(op, self.makers) for v in part.results}
        self.decisions = Decisions(assignment)
        self.done: dict[Any, Any] = {}

    def jaxpr(self, jaxpr: Any, scope: Scope, *, inputs: bool = False) -> Any:
        key = (id(jaxpr), self.signature(scope), inputs, scope.manual, scope.divergent)
        if key not in self.done:  # one body called twice with equal splits stays one body
            self.done[key] = _Body(self, jaxpr, scope).rebuilt(inputs)
        return self.done[key]

    def maker(self, scope: Scope, eqn: Any) -> Op | None:
        """The op of an equation, if it has one with a rule."""
        atoms = [scope.env[v] for v in eqn.outvars if not compat.is_drop(v)]
        op = self.makers.get(atoms[0]) if atoms and atoms[0] is not None else None
        return op if op is not None and op.rule is not None and op.site and op.site[0] is eqn else None

    def signature(self, scope: Scope) -> tuple:
        env = tuple(self.spec(a) for a in scope.env.values())
        rows = (*scope.entries.values(), scope.exits, scope.read, scope.added)
        moves = tuple(tuple(self.spec(a) for a in row) for row in rows)
        return env, moves, tuple(self.signature(child) for child in scope.children.values())

    def mesh_in(self, scope: Scope) -> AbstractMesh:
        """The mesh as the equations of a scope see it: some of its axes may be manual there."""
        return self.mesh.update_axis_types(dict.fromkeys(scope.manual, AxisType.Manual)) if scope.manual else self.mesh

    def spec(self, atom: Atom) -> Spec | None:
        return None if atom is None else self.specs[atom]

    def wanted(self, atom: Atom, aval: Any) -> Spec | None:
        """The spec to constrain a value to; None for scalars, constants, keys and values left to XLA."""
        if atom is None or not getattr(aval, "shape", ()):
            return None
        spec = self.specs[atom]
        is_key = compat.is_extended(aval.dtype)
        return None if spec.is_open or (is_key and not any(spec.axes)) else spec

    def exact(self, spec: Spec, shape: tuple[int, ...]) -> bool:
        """Whether XLA can be told the whole of a spec, at arguments too: no parts of axes, nothing to pad."""
        return not spec.has_parts and not indivisible(spec, shape, self.sizes)


class _Body:
    """The rewriting of one jaxpr in one scope."""

    def __init__(self, rewriter: _Rewriter, jaxpr: Any, scope: Scope):
        self.rewriter, self.original, self.scope = rewriter, jaxpr, scope
        self.eqns: list[Any] = []
        self.swapped: dict[Any, Any] = {}
        self.moves: dict[tuple[Any, Any], Any] = {}
        self.settled: set[Any] = set()
        self.moving: set[Any] = set()
        """What is told first how it lies: XLA takes the only thing that it is told for how a value is made."""
        self.sources: list[Any] = []
        self.decisions: list[Decision | None] = []
        self.exactly: dict[Any, Spec | None] = {}
        self.mesh = rewriter.mesh_in(scope)

    def settle(self, inputs: bool) -> None:
        """Finds what needs no constraint; the program's own arguments and results are told to XLA by `jax.jit`."""
        source = self.scope.jaxpr
        whole = self.scope is self.rewriter.program and not inputs
        targets = self.scope.exits or [None] * len(source.outvars)
        loose = [v for v, t in zip(source.outvars, targets, strict=True) if not whole or not self.arrives(v, t)]
        known = source.invars if whole or inputs else ()
        self.settled = settled(self.scope, self.rewriter.makers, self.exact, known=known, loose=loose)
        for eqn in source.eqns:
            op = self.rewriter.maker(self.scope, eqn)
            self.sources.append(eqn if op is None or self.scope.divergent else self.turned(op, eqn))
            if op is not None and op.results[0] in self.rewriter.turning:
                self.settled.update(eqn.outvars)
                op = None
            elif op is not None and not self.scope.divergent and rotation(op, self.rewriter.makers) is not None:
                op = None
            decision = self.decision(op, eqn)
            self.decisions.append(decision)
            if decision is not None:
                pairs = zip(eqn.invars, decision.operands, strict=True)
                self.moving.update(v for v, steps in pairs if steps)
            if eqn.primitive.name in limits.LIMITS:
                found = self.found(eqn)
                pairs = zip(eqn.invars, found, self.lying(eqn, found), strict=False)
                self.moving.update(v for v, have, need in pairs if have != need)
        self.settled -= self.moving

    def arrives(self, var: Any, target: Atom) -> bool:
        """Whether a result of the program leaves it as it is made."""
        return target is None or self.rewriter.spec(self.atom(var)) == self.rewriter.spec(target)

    def exact(self, var: Any) -> Spec | None:
        """The spec that a variable is constrained to, if XLA can be told the whole of it."""
        if var not in self.exactly:
            spec = self.rewriter.wanted(self.atom(var), var.aval)
            told = spec is not None and self.rewriter.exact(spec, var.aval.shape)
            self.exactly[var] = spec if told else None
        return self.exactly[var]

    def rebuilt(self, inputs: bool) -> Any:
        source = self.scope.jaxpr
        self.settle(inputs)
        first, last = (source.eqns[0], source.eqns[-1]) if source.eqns else (None, None)
        if inputs:
            for var in source.invars:
                self.argument(var, first)
        for var in source.invars if self.scope is not self.rewriter.program else ():
            if var in self.moving and self.scope.env[var] in self.scope.exits:  # a loop carries it
                self.argument(var, first)
        for var in source.invars if self.scope.manual else ():
            self.part_of(var, first)
        for var, stack in zip(source.invars, self.scope.read, strict=False):
            self.sliced(var, stack, first)
        for i, eqn in enumerate(self.sources):
            self.equation(i, eqn)
        outvars = [self.read(v) for v in source.outvars]
        if self.scope.exits:
            pairs = zip(outvars, source.outvars, self.scope.exits, strict=True)
            outvars = [self.moved(new, old, target, last, asked=inputs) for new, old, target in pairs]
            outvars = self.returned(outvars) if self.scope.manual else outvars
        if self.scope.added:
            stacked = zip(outvars, source.outvars, self.scope.added, strict=True)
            outvars = [self.stacked(new, old, stack, last) for new, old, stack in stacked]
        return compat.rebuild(self.original, eqns=self.eqns, outvars=outvars)

    def returned(self, outvars: list[Any]) -> list[Any]:
        """Results told how they lie also where a call makes them, which in manual code says that they lie anyhow.

        Of the branches of a conditional XLA refuses those that say something else than another.
        """
        called = {v: eqn for eqn in self.scope.jaxpr.eqns if eqn.primitive.name in CALLS for v in eqn.outvars}
        found = []
        for var in outvars:
            spec = self.wanted(var) if not compat.is_literal(var) and var in called else None
            found.append(var if spec is None else self.emit(var, spec, called[var]))
        return found

    def argument(self, var: Any, eqn: Any) -> None:
        atom = self.scope.env[var]
        spec = self.rewriter.wanted(atom, var.aval)
        if spec is not None:
            pin = self.rewriter.pins.get(atom) if atom is not None else None
            self.swapped[var] = self.emit(var, spec, eqn, asked=pin.spec if pin else None)

    def part_of(self, var: Any, eqn: Any) -> None:
        """What a `shard_map` takes in lies as it does outside, and moves first, not where XLA meets its first use."""
        atom, manual = self.scope.env[var], self.scope.manual
        op = self.rewriter.makers.get(atom) if atom is not None else None
        want = self.wanted(var)
        if op is None or op.name != "shard_map" or want is None:
            return
        outside = self.rewriter.specs[op.operands[0]]
        have = Spec(dims=tuple(Dim(axes=tuple(a for a in axes if a not in manual)) for axes in outside.axes))
        if have.axes != want.axes:
            self.swapped[var] = self.reshard(self.emit(var, have, eqn), have, want, eqn)

    def sliced(self, var: Any, stack: Atom, eqn: Any) -> None:
        """What a loop reads of a stack lies as that does, and moves to where it was decided to lie."""
        have, want = self.part(stack), self.wanted(var)
        if have is not None and want is not None and have.axes != want.axes:
            self.swapped[var] = self.reshard(self.emit(var, have, eqn), have, want, eqn)

    def stacked(self, new: Any, old: Any, stack: Atom, eqn: Any) -> Any:
        """What a loop adds to a stack, where that needs it."""
        have, want = self.wanted(old), self.part(stack)
        if have is None or want is None or have.axes == want.axes:
            return new
        return self.reshard(new, have, want, eqn)

    def part(self, stack: Atom) -> Spec | None:
        """How one step's part of a stack lies."""
        return None if stack is None else self.rewriter.specs[stack].row

    def read(self, atom: Any) -> Any:
        return atom if compat.is_literal(atom) else self.swapped.get(atom, atom)

    def turned(self, op: Op, eqn: Any) -> Any:
        """A sum that is the derivative of a rotation as the rotation that it is, which XLA knows."""
        back = rotation_back(op, self.rewriter.makers)
        if back is None:
            return eqn
        pads = [self.rewriter.makers[v].site[0] for v in op.operands]
        if not all(v in self.scope.env for pad in pads for v in pad.invars[:1]):
            return eqn
        dim, _ = back
        parts = [pad.invars[0] for pad in sorted(pads, key=lambda pad: pad.params["padding_config"][dim][0])]
        return compat.new_eqn(eqn, parts, eqn.outvars, jax.lax.concatenate_p, {"dimension": dim})

    def equation(self, i: int, eqn: Any) -> None:
        invars = [self.read(v) for v in eqn.invars]
        if eqn.primitive is annotation.annotate_p:
            self.annotated(eqn, invars[0])
            return
        if i in self.scope.entries:
            skip = len(invars) - len(self.scope.entries[i])
            pairs = zip(invars, eqn.invars, [None] * skip + self.scope.entries[i], strict=True)
            invars = [self.moved(new, old, target, eqn) for new, old, target in pairs]
        results: list[Spec | None] = [None] * len(eqn.outvars)
        decision, is_limited = self.decisions[i], eqn.primitive.name in limits.NAMES
        if decision is not None or is_limited:
            found = self.found(eqn)
            if decision is not None:
                invars, results = self.decided(eqn, decision, invars, found)
            if is_limited:
                invars, lying = self.limited(eqn, invars, found)
                results = [b if b is not None else a for a, b in zip(results, lying, strict=True)]
        laid_out = eqn.primitive.name in limits.LAID_OUT
        if laid_out:
            invars = [self.laid_out(v, eqn) for v in invars]
        self.eqns.append(eqn.replace(invars=invars, params=self.parameters(i, eqn)))
        if laid_out:
            self.swapped.update((v, self.laid_out(v, eqn)) for v in eqn.outvars if not compat.is_drop(v))
        for var, spec in zip(list(eqn.outvars), results, strict=True):
            if spec is not None:
                self.swapped[var] = self.emit(self.read(var), spec, eqn)
        if eqn.primitive.name in CALLS:
            return  # constrained inside
        for var, have in zip(list(eqn.outvars), results, strict=True):
            spec = None if compat.is_drop(var) or (have is None and var in self.settled) else self.wanted(var)
            if spec is not None:
                self.swapped[var] = self.reshard(self.read(var), have, spec, eqn)

    def found(self, eqn: Any) -> list[Spec | None]:
        """How the operands and results of an equation were decided to lie."""
        return [None if compat.is_drop(v) else self.wanted(v) for v in (*eqn.invars, *eqn.outvars)]

    def decision(self, op: Op | None, eqn: Any) -> Decision | None:
        """How an equation runs, if something moves on the way."""
        if op is None or len(op.operands) != len(eqn.invars):
            return None
        decision = self.rewriter.decisions.of(op)
        is_read = op.name in limits.READ and any(decision.operands)
        assert op.rule is not None
        is_kept_whole = self.scope.divergent and not EXCHANGED.isdisjoint(op.rule.kinds)
        return decision if is_read or is_kept_whole or any(step.kind != "slice" for step in decision.steps) else None

    def decided(
        self, eqn: Any, decision: Decision, invars: list[Any], found: list[Spec | None]
    ) -> tuple[list[Any], list[Spec | None]]:
        """Operands moved to where the op needs them, and where its results lie then, if they move on from there.

        What was decided takes the place of what was `found`.
        """
        n = len(invars)
        for k, (var, steps, need) in enumerate(zip(eqn.invars, decision.operands, decision.needs, strict=True)):
            if steps:
                invars[k] = self.walked(invars[k], var, steps, eqn)
            elif self.atom(var) is None and (any(need.axes) or (self.scope.divergent and need.dims)):  # made here
                invars[k] = self.emit(invars[k], need, eqn)
            found[k] = need if found[k] is not None or any(need.axes) else None
        results: list[Spec | None] = [None] * len(eqn.outvars)
        for k, (spec, told) in enumerate(zip(decision.runs_as, decision.told, strict=True)):
            if told and found[n + k] is not None:
                found[n + k] = results[k] = spec
        return invars, results

    def walked(self, operand: Any, var: Any, steps: Sequence[Step], eqn: Any) -> Any:
        """An operand behind all steps of a chain; where others went the same way, the same variables."""
        for step in steps:
            key = (var, step.spec.axes)
            if key not in self.moves:
                self.moves[key] = self.emit(operand, step.spec, eqn)
            operand = self.moves[key]
        return operand

    def limited(self, eqn: Any, invars: list[Any], found: list[Spec | None]) -> tuple[list[Any], list[Spec | None]]:
        """Operands moved to where XLA computes the op rightly, and where its results then come to lie, if elsewhere."""
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        needed, n = self.lying(eqn, found), len(invars)
        pairs = zip(invars, found[:n], needed[:n], strict=True)
        moved = [v if have == need or need is None else self.reshard(v, have, need, eqn) for v, have, need in pairs]
        for i, most in limits.starts(eqn.primitive.name, shapes, found):
            moved[i] = self.clamped(moved[i], most, eqn)
        pairs = zip(eqn.outvars, found[n:], needed[n:], strict=True)
        return moved, [None if have == need or compat.is_drop(v) else need for v, have, need in pairs]

    def lying(self, eqn: Any, found: list[Spec | None]) -> list[Spec | None]:
        """How operands and results have to lie for XLA to compute an equation rightly."""
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        sizes, is_manual = self.rewriter.sizes, bool(self.scope.manual)
        return limits.specs(eqn.primitive.name, eqn.params, shapes, found, sizes, is_manual=is_manual)

    def laid_out(self, var: Any, eqn: Any) -> Any:
        new = compat.new_var(var.aval)
        self.eqns.append(compat.layout_constraint(eqn, var, new))
        return new

    def clamped(self, index: Any, most: int, eqn: Any) -> Any:
        new = compat.new_var(index.aval)
        ends = [compat.new_literal(n, index.aval) for n in (0, most)]
        self.eqns.append(compat.new_eqn(eqn, [ends[0], index, ends[1]], [new], jax.lax.clamp_p, {}))
        return new

    def wanted(self, var: Any) -> Spec | None:
        return self.rewriter.wanted(self.atom(var), var.aval)

    def annotated(self, eqn: Any, operand: Any) -> None:
        """An annotation stays where it is, with the completed spec in place of the asked one."""
        (var,) = eqn.outvars
        if compat.is_drop(var):
            return
        self.swapped[var] = operand
        spec = self.rewriter.wanted(self.scope.env[var], var.aval)
        if spec is not None:
            have, p = self.wanted(eqn.invars[0]), eqn.params
            self.swapped[var] = self.reshard(operand, have, spec, eqn, asked=p["asked"], name=p["name"])

    def atom(self, var: Any) -> Atom:
        return None if compat.is_literal(var) else self.scope.env[var]

    def moved(self, operand: Any, var: Any, target: Atom, eqn: Any, *, asked: bool = False) -> Any:
        """The operand, resharded first if what it enters is split otherwise, or (`asked`) if the user said how."""
        spec = self.rewriter.wanted(target, var.aval)
        pin = self.rewriter.pins.get(target) if asked and target is not None else None
        if spec is None or (pin is None and self.rewriter.spec(self.atom(var)) == spec):
            return operand
        permutes = target not in self.rewriter.divergent
        return self.reshard(operand, self.wanted(var), spec, eqn, asked=pin.spec if pin else None, permutes=permutes)

    def reshard(
        self,
        operand: Any,
        have: Spec | None,
        spec: Spec,
        eqn: Any,
        *,
        asked: Spec | None = None,
        name: str | None = None,
        permutes: bool = True,
    ) -> Any:
        """The operand, split so far as `have` says, brought to a spec step by step."""
        itemsize = getattr(operand.aval.dtype, "itemsize", 0)
        permutes = permutes and not self.scope.divergent
        if have is not None and itemsize:
            for step in chain(have, spec, operand.aval.shape, itemsize, self.rewriter.sizes, permutes=permutes)[:-1]:
                operand = self.emit(operand, step.spec, eqn)
        return self.emit(operand, spec, eqn, asked=asked, name=name)

    def emit(self, operand: Any, spec: Spec, eqn: Any, *, asked: Spec | None = None, name: str | None = None) -> Any:
        new = compat.new_var(operand.aval)
        mesh = self.mesh
        if not mesh.manual_axes:  # in the body of a shard_map parts of an axis are left to XLA
            mesh, spec = refine(mesh, spec)
        params = annotation.completed(spec, mesh, asked=asked, name=name)
        self.eqns.append(compat.new_eqn(eqn, [operand], [new], annotation.annotate_p, params))
        return new

    def parameters(self, i: int, eqn: Any) -> dict[str, Any]:
        params = dict(eqn.params)
        if eqn.primitive in (same_p, barrier_p):
            params["decided"] = True
        for key, pos, jaxpr in compat.sub_jaxprs(eqn.params):
            child = self.scope.children.get((i, key, pos))
            if child is not None:
                params = compat.with_jaxpr(params, key, pos, self.rewriter.jaxpr(jaxpr, child))
        return params
