"""The rewriter: adds the sharding of every value to a program as constraints.

The jaxpr is rewritten in place: each equation is followed by a constraint on each of its results, also in nested
jaxprs, which go back into their own equations with all other parameters unchanged. So remat stays remat, custom
derivatives keep their rules, effects keep their order. Constraining every value compiles to the program that XLA would
have made from the same shardings, and leaves it nothing to infer. Redundant constraints (`redundant_constraints.py`)
are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh

from .. import compat
from ..annotations import annotate
from ..annotations.propagation_barrier import barrier_p
from ..annotations.same import same_p
from ..graph import CALLS, Atom, Op, Scope
from ..propagation import Assignment
from ..rules import ON_SHARDS
from ..spec import Spec
from . import body_boundary, xla_workarounds
from .constraint_emitter import AssignedProgram, ConstraintEmitter
from .executed_assignment import executed
from .host_memory import memory_alone
from .local_convolution import is_grouped
from .local_equations import WRITTEN_OTHERWISE, local_equation
from .op_strategy import HALO_KINDS, OpStrategies, OpStrategy
from .parts_of_sums import is_scattered_then_sliced
from .redundant_constraints import redundant
from .reshard import Step
from .rotation import rotated_specs, rotation, rotation_gradient, rotation_parts
from .rounded_products import rounded_product
from .scanned_stacks import scanned_spec, scanned_steps


def constrain(closed_jaxpr: Any, assignment: Assignment, mesh: AbstractMesh, *, inputs: bool = False) -> Any:
    """Returns a closed jaxpr of the same type with the specs of `assignment` as constraints.

    Args:
        closed_jaxpr: the program that the assignment's graph was built from.
        assignment: a spec per value.
        mesh: the mesh of the specs.
        inputs: constrain the arguments too, for a program that runs inside another one.
    """
    assert assignment.graph.scope is not None
    rewriter = _Rewriter(executed(assignment), mesh)
    return rewriter.jaxpr(closed_jaxpr, assignment.graph.scope, inputs=inputs)


BOUNDARIES = frozenset({"edge", "scan xs", "scan ys"})
"""Ops of values that enter or leave loops and branches."""


class _Rewriter:
    def __init__(self, assignment: Assignment, mesh: AbstractMesh):
        self.program = AssignedProgram(assignment, mesh)
        graph = assignment.graph
        everywhere = (op for op in graph.ops if not graph.diverges(op))
        self.rotated = {v for op in everywhere for part in rotation_parts(op, graph.makers) for v in part.results}
        """Values inside rotations."""
        self.rotated_as = rotated_specs(graph, assignment.specs)
        """Slice of a rotated array -> the spec of the rotation, which the array needs, too."""
        self.strategies, self.users = OpStrategies(assignment), graph.users
        self.carried = {a for scope in graph.scopes() if scope is not graph.scope for a in scope.exits if a is not None}
        """Values that loops carry and branches return."""
        self.rounding = {id(op.site[0]) for op in graph.ops if rounded_product(graph, op) is not None}
        """Ids of the equations that round products, and are constrained in their place."""
        self.done: dict[Any, Any] = {}
        self.signatures, self.numbers = dict[Scope, int](), dict[tuple, int]()

    def jaxpr(self, jaxpr: Any, scope: Scope, *, inputs: bool = False, is_remat: bool = False) -> Any:
        key = (id(jaxpr), self.signature(scope), inputs, is_remat, scope.manual, scope.divergent)
        if key not in self.done:  # a body called twice with equal shardings stays one body
            self.done[key] = _Body(self, jaxpr, scope).rewritten(inputs, is_remat)
        return self.done[key]

    def maker(self, scope: Scope, i: int, eqn: Any) -> Op | None:
        """Returns the op of an equation, if it has one with a rule."""
        if i in scope.opaque:
            return scope.opaque[i]
        atoms = [scope.env[v] for v in eqn.outvars if not compat.is_drop(v)]
        op = self.program.makers.get(atoms[0]) if atoms and atoms[0] is not None else None
        if op is None or op.rule is None or op.name in BOUNDARIES:
            return None
        return op if op.site and op.site[0] is eqn else None

    def signature(self, scope: Scope) -> int:
        """Returns a number that two scopes of one jaxpr share if their values are sharded identically."""
        if scope not in self.signatures:
            rows = (*scope.entries.values(), scope.exits, scope.stacked_inputs, scope.stacked_outputs)
            specs = tuple(tuple(map(self.program.spec, row)) for row in (scope.env.values(), *rows))
            key = (specs, tuple(map(self.signature, scope.children.values())))
            self.signatures[scope] = self.numbers.setdefault(key, len(self.numbers))
        return self.signatures[scope]


class _Body(ConstraintEmitter):
    """The rewriting of one jaxpr in one scope."""

    def __init__(self, rewriter: _Rewriter, jaxpr: Any, scope: Scope):
        super().__init__(rewriter.program, scope)
        self.rewriter, self.original = rewriter, jaxpr
        self.arguments = set(scope.jaxpr.invars)
        self.unconstrained: set[Any] = set()
        self.resharded: set[Any] = set()
        """Variables resharded before a use: constrained first, or XLA computes them with the resharded spec."""
        self.source_eqns: list[Any] = []
        self.strategies: list[OpStrategy | None] = []
        self.exact_specs: dict[Any, Spec | None] = {}

    def plan(self, inputs: bool) -> None:
        """Chooses the strategy of each equation and the variables that need no constraint.

        Those of the program's own arguments and results are left to `jax.jit`.
        """
        source = self.scope.jaxpr
        is_program = self.scope is self.program.scope and not inputs
        targets = self.scope.exits or [None] * len(source.outvars)
        pairs = zip(source.outvars, targets, strict=True)
        unknown_uses = [v for v, t in pairs if not is_program or not self.is_returned_as_is(v, t)]
        known = source.invars if is_program or inputs else ()
        makers = self.program.makers
        self.unconstrained = redundant(self.scope, makers, self.exact_spec, known=known, unknown_uses=unknown_uses)
        annotations = (eqn for eqn in source.eqns if eqn.primitive is annotate.annotate_p)
        self.constants = {e.outvars[0]: e.invars[0] for e in annotations if self.atom(e.invars[0]) is None}
        for i, eqn in enumerate(source.eqns):
            op = self.rewriter.maker(self.scope, i, eqn)
            self.source_eqns.append(eqn if op is None or self.scope.divergent else self.as_rotation(op, eqn))
            if op is not None and not self.rewriter.rotated.isdisjoint(op.results):
                self.unconstrained.update(eqn.outvars)
                op = None
            elif op is not None and not self.scope.divergent and rotation(op, makers) is not None:
                op = None
            strategy = self.strategy(op, eqn)
            self.strategies.append(strategy)
            if strategy is not None:
                pairs = zip(eqn.invars, strategy.operand_steps, strict=True)
                self.resharded.update(v for v, steps in pairs if steps)
            elif op is not None and self.scope is not self.program.scope and len(op.operands) == len(eqn.invars):
                self.resharded.update(self.arguments_read_otherwise(op, eqn))
            if eqn.primitive.name in xla_workarounds.WORKAROUNDS:
                found = self.eqn_specs(eqn)
                pairs = zip(eqn.invars, found, self.workaround_specs(eqn, found), strict=False)
                self.resharded.update(v for v, have, need in pairs if have != need)
        self.unconstrained -= self.resharded
        rounding = [eqn for eqn in source.eqns if id(eqn) in self.rewriter.rounding]
        self.unconstrained.difference_update(v for eqn in rounding for v in eqn.outvars)
        self.unconstrained.update(v for eqn in rounding for v in eqn.invars)

    def arguments_read_otherwise(self, op: Op, eqn: Any) -> Iterator[Any]:
        """Yields the arguments of the jaxpr that an equation reads, if XLA may shard them differently for it."""
        strategy = self.rewriter.strategies.of(op)
        for var, v, spec in zip(eqn.invars, op.operands, strategy.needed, strict=True):
            is_argument = not compat.is_literal(var) and var in self.arguments
            if is_argument and (self.program.specs[v].axes != spec.axes or any(strategy.result_steps)):
                yield var

    def is_returned_as_is(self, var: Any, target: Atom) -> bool:
        """Whether a result of the program is returned with its own spec."""
        return target is None or self.program.spec(self.atom(var)) == self.program.spec(target)

    def exact_spec(self, var: Any) -> Spec | None:
        """Returns the spec to constrain a variable to, if a sharding can express it exactly."""
        if var not in self.exact_specs:
            self.exact_specs[var] = self.program.exact_spec(self.atom(var), var.aval)
        return self.exact_specs[var]

    def rewritten(self, inputs: bool, is_remat: bool) -> Any:
        source = self.scope.jaxpr
        self.plan(inputs)
        first, last = (source.eqns[0], source.eqns[-1]) if source.eqns else (None, None)
        for var in source.invars if self.scope is self.program.scope else ():
            if inputs or not self.program.arrives_as_inferred(self.atom(var)):
                body_boundary.argument(self, var, first)
        if self.scope is not self.program.scope:
            kept = partial(body_boundary.kept_arguments, self.scope, self.resharded, self.rewriter.strategies)
            for var in kept(self.rewriter.users, self.rewriter.carried, is_remat=is_remat):
                body_boundary.argument(self, var, first)
        for var in source.invars if self.scope.manual else ():
            body_boundary.shard_map_argument(self, var, first)
        for var, stacked in zip(source.invars, self.scope.stacked_inputs, strict=False):
            row = None if stacked is None else scanned_spec(self.rewriter.strategies, stacked).row
            body_boundary.scan_slice(self, var, row, first)
        for i, eqn in enumerate(self.source_eqns):
            self.equation(i, eqn)
        outvars = [self.read(v) for v in source.outvars]
        if self.scope.exits:
            pairs = zip(outvars, source.outvars, self.scope.exits, strict=True)
            options = {"annotated": inputs, "is_output": self.scope is self.program.scope}
            outvars = [body_boundary.edge_operand(self, *row, last, **options) for row in pairs]
            outvars = body_boundary.call_results(self, outvars) if self.scope.manual else outvars
        if self.scope.stacked_outputs:
            rows = zip(outvars, source.outvars, self.scope.stacked_outputs, strict=True)
            outvars = [body_boundary.scan_update(self, new, old, stacked, last) for new, old, stacked in rows]
        return compat.rebuild(self.original, eqns=self.eqns, outvars=outvars)

    def as_rotation(self, op: Op, eqn: Any) -> Any:
        """Returns the equation of a rotation's gradient, a sum, as the rotation that it is, which XLA recognises."""
        makers = self.program.makers
        back = rotation_gradient(op, makers)
        if back is None:
            return eqn
        pads = [makers[v].site[0] for v in op.operands]
        if not all(v in self.scope.env for pad in pads for v in pad.invars[:1]):
            return eqn
        parts = [pad.invars[0] for pad in sorted(pads, key=lambda pad: pad.params["padding_config"][back[0]][0])]
        return compat.new_eqn(eqn, parts, eqn.outvars, jax.lax.concatenate_p, {"dimension": back[0]})

    def equation(self, i: int, eqn: Any) -> None:
        invars = [self.read(v) for v in eqn.invars]
        if eqn.primitive is annotate.annotate_p or self.is_plain_constraint(eqn):
            self.annotation(eqn, invars[0])
            return
        if i in self.scope.entries:
            skip = len(invars) - len(self.scope.entries[i])
            pairs = zip(invars, eqn.invars, [None] * skip + self.scope.entries[i], strict=True)
            invars = [body_boundary.edge_operand(self, new, old, target, eqn) for new, old, target in pairs]
        if (child := self.scope.children.get((i, "jaxpr", 0))) is not None and child.stacked_inputs:
            invars = [self.scanned(*row, eqn) for row in zip(invars, eqn.invars, child.stacked_inputs, strict=True)]
        results = self.stacked(eqn, child)
        if (spec := self.rotated_spec(eqn)) is not None:
            invars[0] = self.reshard_once(eqn.invars[0], spec, eqn)
        strategy, is_affected = self.strategies[i], eqn.primitive.name in xla_workarounds.AFFECTED
        if strategy is not None or is_affected:
            found = self.eqn_specs(eqn)
            planned = found if strategy is None else strategy.planned(found)
            safe = self.workaround_specs(eqn, planned) if is_affected else planned
            invars = self.resharded_operands(eqn, strategy, invars, found, planned, safe)
            n, constrained = len(invars), strategy.constrained if strategy is not None else ()
            for k, (one, other) in enumerate(zip(planned[n:], safe[n:], strict=True)):
                if one != other or (one is not None and k < len(constrained) and constrained[k]):
                    results[k] = None if compat.is_drop(eqn.outvars[k]) else other
        fixed_layout = eqn.primitive.name in xla_workarounds.FIXED_LAYOUT
        if fixed_layout:
            invars = [self.with_layout(v, eqn) for v in invars]
        if instead := self.instead(i, eqn, strategy):
            self.inline(instead, invars, eqn)
        else:
            self.eqns.append(eqn.replace(invars=invars, params=self.parameters(i, eqn)))
        if fixed_layout:
            self.replaced.update((v, self.with_layout(v, eqn)) for v in eqn.outvars if not compat.is_drop(v))
        for var, spec in zip(list(eqn.outvars), results, strict=True):
            if spec is not None:
                self.replaced[var] = self.emit(self.read(var), spec, eqn)
        if eqn.primitive.name in CALLS:
            return  # constrained inside
        for var, have in zip(list(eqn.outvars), results, strict=True):
            spec = None if compat.is_drop(var) or (have is None and var in self.unconstrained) else self.var_spec(var)
            if spec is not None:
                self.replaced[var] = self.reshard(self.read(var), have, spec, eqn)
        if strategy is not None and len(eqn.outvars) == 1 and not compat.is_drop(var := eqn.outvars[0]):
            if is_scattered_then_sliced(strategy, self.atom(var), self.rewriter.users):
                self.inline(jax.lax.optimization_barrier, [self.read(var)], eqn)

    def rotated_spec(self, eqn: Any) -> Spec | None:
        """The spec of the rotation that an equation slices an array for, if any."""
        atoms = [] if self.scope.divergent else [self.scope.env[v] for v in eqn.outvars if not compat.is_drop(v)]
        return next((self.rewriter.rotated_as[a] for a in atoms if a in self.rewriter.rotated_as), None)

    def reshard_once(self, var: Any, spec: Spec, eqn: Any) -> Any:
        """Reshards an operand to a spec, step by step; uses with a common prefix of steps share its variables."""
        have, itemsize = self.var_spec(var), getattr(var.aval.dtype, "itemsize", 0)
        if have is None or have.axes == spec.axes or not itemsize:
            return self.read(var)
        steps = self.program.chain(have, spec, var.aval)
        return self.apply_steps(self.read(var), var, steps, eqn)

    def scanned(self, operand: Any, var: Any, stacked: Atom, eqn: Any) -> Any:
        """Reshards an array that a `scan` slices to what its slices need."""
        have, strategies = self.var_spec(var), self.rewriter.strategies
        if stacked is None or have is None:
            return operand
        if have.axes != self.program.specs[stacked].axes:
            return self.reshard(operand, have, scanned_spec(strategies, stacked), eqn)
        return self.apply_steps(operand, var, scanned_steps(strategies, stacked), eqn)

    def stacked(self, eqn: Any, child: Scope | None) -> list[Spec | None]:
        """The specs of a `scan`'s results in the loop, where they differ from those behind it."""
        stacks = child.stacked_outputs if child is not None else []
        if not stacks:
            return [None] * len(eqn.outvars)
        pairs = zip(stacks, eqn.outvars, strict=True)
        specs = [(self.program.spec(a), None if compat.is_drop(v) else self.var_spec(v)) for a, v in pairs]
        return [s if s is not None and behind is not None and s.axes != behind.axes else None for s, behind in specs]

    def instead(self, i: int, eqn: Any, strategy: OpStrategy | None) -> Callable[..., Any] | None:
        """A function of an equation's operands that computes the same, where XLA would gather them."""
        if eqn.primitive.name not in (ON_SHARDS if self.scope.manual else WRITTEN_OTHERWISE):
            return None
        found = self.eqn_specs(eqn) if strategy is None else [*strategy.operand_specs, *strategy.result_specs]
        op = self.rewriter.maker(self.scope, i, eqn)
        rule = op.rule if op is not None and not op.is_unknown else None
        return local_equation(eqn, rule, found, self.mesh, self.program.sizes)

    def annotation(self, eqn: Any, operand: Any) -> None:
        """Keeps an annotation in place, with the inferred spec instead of the user's."""
        (var,) = eqn.outvars
        if compat.is_drop(var):
            return
        self.replaced[var] = operand
        spec, atom = self.var_spec(var), self.atom(var)
        if spec is None:
            return
        annotation = self.program.annotations.get(atom) if atom is not None else None
        asked = eqn.params.get("asked", annotation.spec if annotation else None)
        have, name = self.var_spec(eqn.invars[0]), eqn.params.get("name")
        self.replaced[var] = self.reshard(operand, have, spec, eqn, asked=asked, name=name)
        if self.atom(var) is not None and self.atom(var) == self.atom(eqn.invars[0]):
            self.replaced[eqn.invars[0]] = self.replaced[var]  # of one variable, one reshard is shared by all uses

    def eqn_specs(self, eqn: Any) -> list[Spec | None]:
        """Returns the specs to constrain an equation's operands and results to."""
        return [None if compat.is_drop(v) else self.var_spec(v) for v in (*eqn.invars, *eqn.outvars)]

    def strategy(self, op: Op | None, eqn: Any) -> OpStrategy | None:
        """Returns the strategy of an equation, if it needs constraints other than those of its operands and results."""
        if op is None or len(op.operands) != len(eqn.invars):
            return None
        strategy = self.rewriter.strategies.of(op)
        slices_first = op.name in xla_workarounds.OPERAND_FIRST and any(strategy.operand_steps)
        no_halo = self.scope.divergent and op.rule is not None and not HALO_KINDS.isdisjoint(op.rule.kinds)
        moves = any(step.kind != "slice" for step in strategy.steps)
        is_local = op.name in ON_SHARDS or (op.name == "conv_general_dilated" and is_grouped(eqn.params))
        pairs = zip(eqn.invars, strategy.operand_specs, strict=True)
        elsewhere = any(self.is_constant_elsewhere(var, need) for var, need in pairs)
        found = slices_first or no_halo or moves or is_local or elsewhere or any(strategy.constrained)
        return strategy if found else None

    def resharded_operands(
        self,
        eqn: Any,
        strategy: OpStrategy | None,
        invars: list[Any],
        found: Sequence[Spec | None],
        planned: Sequence[Spec | None],
        safe: Sequence[Spec | None],
    ) -> list[Any]:
        """Reshards the operands as planned, or at once to the specs that XLA partitions correctly."""
        operands = list(invars)
        for k, (var, have, plan, need) in enumerate(zip(eqn.invars, found, planned, safe, strict=False)):
            steps = strategy.operand_steps[k] if strategy is not None else ()
            if need is not None and need != plan:
                operands[k] = invars[k] if have == need else self.reshard(invars[k], have, need, eqn)
            elif steps:
                operands[k] = self.apply_steps(invars[k], var, steps, eqn)
            elif strategy is None:
                continue
            elif self.atom(var) is None and (
                plan is not None or (self.scope.divergent and var.aval.shape)
            ):  # a constant
                operands[k] = self.emit(invars[k], strategy.operand_specs[k], eqn)
            elif self.is_constant_elsewhere(var, strategy.operand_specs[k]):
                operands[k] = self.emit(self.read(self.constants[var]), strategy.operand_specs[k], eqn)
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        for i, largest in xla_workarounds.starts(eqn.primitive.name, eqn.params, shapes, planned):
            operands[i] = self.clamp(operands[i], largest, eqn)
        return operands

    def is_constant_elsewhere(self, var: Any, need: Spec) -> bool:
        """Whether a variable is a constant that is annotated with another spec than is needed."""
        return not compat.is_literal(var) and var in self.constants and self.var_spec(var) != need

    def apply_steps(self, operand: Any, var: Any, steps: Sequence[Step], eqn: Any) -> Any:
        """Reshards an operand step by step; uses with a common prefix of steps share its variables."""
        operand = self.before_last(operand, self.var_spec(var), steps, eqn)
        return self.emit_once(operand, steps[-1].spec, eqn) if steps else operand

    def workaround_specs(self, eqn: Any, found: Sequence[Spec | None]) -> list[Spec | None]:
        """Returns the specs under which XLA partitions an equation correctly."""
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        sizes, is_manual = self.program.sizes, bool(self.scope.manual)
        return xla_workarounds.specs(eqn.primitive.name, eqn.params, shapes, found, sizes, is_manual=is_manual)

    def parameters(self, i: int, eqn: Any) -> dict[str, Any]:
        params = dict(eqn.params)
        if eqn.primitive in (same_p, barrier_p):
            params["decided"] = True
        if eqn.primitive.name == "device_put":
            params["devices"] = tuple(map(memory_alone, params["devices"]))
        for key, pos, jaxpr in compat.sub_jaxprs(eqn.params):
            child = self.scope.children.get((i, key, pos))
            if child is not None:
                new = self.rewriter.jaxpr(jaxpr, child, is_remat=compat.is_recomputed(eqn))
                params = compat.with_jaxpr(params, key, pos, new)
        return params
