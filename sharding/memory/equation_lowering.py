"""Lowering of jaxpr equations to per-device instructions.

Equations are lowered in order, calls inlined. Arrays have their local shapes, padded as XLA pads them. The reshards
before an op and the reductions of partial sums after it become instructions, as the op's strategy (`rewrite`) has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import compat
from ..graph import CALLS, Graph, Scope
from ..propagation import Assignment
from ..rewrite import xla_workarounds
from ..rewrite.bfloat16_propagation import PRODUCTS, narrow_reshards, rounded_values
from ..rewrite.constraint_emitter import AssignedProgram
from ..rewrite.op_strategy import OpStrategies
from ..rewrite.redundant_constraints import redundant
from ..rewrite.reshard import Step
from ..rewrite.rotation import Rotation
from ..spec import Spec, closed_spec
from . import library_calls, primitive_traits, shard_rotation
from .compiler_traits import CompilerTraits
from .emitter import Cursor, Emitter, before_rounding
from .equation_facts import EquationFacts, KnownEquations, itemsize
from .expansions import EXPANSIONS, sliced
from .instruction import Instruction
from .local_op import LocalOp
from .products import matrix_product, of_one_type

Env = dict[Any, Instruction | None]
"""Variable -> the instruction that produces it; None for a constant expression, which each user recomputes."""


Handler = Callable[["Lowering", int, Any, "Scope | None", Env, Emitter], None]
"""(lowering, index of the equation, equation, its scope, environment, emitter) -> None."""


class Lowering:
    """Lowers equations to instructions; handlers lower control flow and other primitives with bodies."""

    def __init__(self, assignment: Assignment, handlers: Mapping[str, Handler], traits: CompilerTraits):
        self.handlers, self.traits = handlers, traits
        self.graph: Graph = assignment.graph
        self.sizes = assignment.sizes
        self.specs = assignment.specs
        self.strategies = OpStrategies.shared(assignment)
        self.program = AssignedProgram(assignment, jax.sharding.AbstractMesh((*self.sizes.values(),), (*self.sizes,)))
        self.equations = KnownEquations.of(self.graph)
        self.unconstrained: dict[Scope, set[Any]] = {}
        """Scope -> the variables whose constraints are left out."""
        self.cursor = Cursor()
        if traits.rounds_early:
            self.cursor.rounded = rounded_values(self.graph)
            moves = narrow_reshards(assignment)
            self.cursor.rounded_moves = {move for move in moves if self.graph.dtype_names[move[0]] == "float32"}

    def spec_of(self, var: Any, scope: Scope | None) -> Spec:
        """The spec of a variable; in manual code its shape is already local, so nothing is sharded."""
        value = self.graph_value(var, scope)
        return self.specs[value] if value is not None else closed_spec(len(var.aval.shape))

    def itemsize(self, aval: Any) -> float:
        """Bytes per element on the device, those of a PRNG key included; an array of the host has none."""
        return itemsize(aval)

    def read(self, atom: Any, env: Env) -> Instruction | None:
        """The instruction that produces an atom; None for constants."""
        return None if compat.is_literal(atom) else env.get(atom)

    def graph_value(self, var: Any, scope: Scope | None) -> int | None:
        """The graph's number of a variable; None if the graph doesn't have it."""
        return None if scope is None or compat.is_literal(var) else scope.env.get(var)

    def lower_equations(self, jaxpr: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
        """Lower all equations of a jaxpr."""
        outer = self.cursor.phase
        for i, eqn in enumerate(jaxpr.eqns):
            facts = self.equations.facts(i, eqn, scope)
            self.cursor.phase, self.cursor.eqn = facts.phase(outer), eqn
            if facts.name in CALLS:
                self.inline_call(i, eqn, scope, env, emitter)
            elif facts.name in self.handlers:
                self.handlers[facts.name](self, i, eqn, scope, env, emitter)
            else:
                self.lower_equation(facts, scope, env, emitter)
        self.cursor.phase = outer

    def inline_call(self, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
        """Lower a call such as `jit` or `remat` by inlining its body."""
        key, pos, jaxpr = next(compat.sub_jaxprs(eqn.params))
        child = scope.children.get((i, key, pos)) if scope is not None else None
        operands = [self.read(a, env) for a in eqn.invars]
        if compat.is_recomputed(eqn):
            operands = self.optimization_barrier(eqn, operands, emitter)
        self.bind(eqn.outvars, self.inline(jaxpr, child, operands, emitter), env)

    def optimization_barrier(
        self, eqn: Any, operands: Sequence[Instruction | None], emitter: Emitter
    ) -> list[Instruction | None]:
        """The operands behind a barrier, which keeps rematerialised ops out of the forward pass."""
        present = [x for x in operands if x is not None]
        barrier = emitter.emit(primitive_traits.BARRIER, "unfusible", present, (0,), 1, eqn=eqn)
        barrier.in_place = tuple((k, k) for k in range(len(present)))
        results = iter(emitter.tuple_elements(barrier, [(x.shape, x.itemsize, x.value, x.eqn) for x in present]))
        return [None if x is None else next(results) for x in operands]

    def inline(self, jaxpr: Any, child: Scope | None, operands: Sequence[Instruction | None], emitter: Emitter) -> list:
        """The results of a jaxpr whose equations are lowered into the current body."""
        body = compat.open_jaxpr(jaxpr)
        inner: Env = dict.fromkeys(body.constvars)
        inner.update(zip(body.invars, operands, strict=True))
        self.lower_equations(body, child, inner, emitter)
        return [self.read(a, inner) for a in body.outvars]

    def bind(self, variables: Sequence[Any], made: Sequence[Instruction | None], env: Env) -> None:
        """Bind variables to the instructions that produce them."""
        env.update((v, x) for v, x in zip(variables, made, strict=True) if not compat.is_drop(v))

    def lower_equation(self, facts: EquationFacts, scope: Scope | None, env: Env, emitter: Emitter) -> None:
        """Lower an equation without a body."""
        eqn, name = facts.eqn, facts.name
        operands = [None if a.variable is None else env.get(a.variable) for a in facts.operands]
        if name in primitive_traits.IDENTITIES:
            if name == primitive_traits.BARRIER:
                operands = self.optimization_barrier(eqn, operands, emitter)
            self.identity(eqn, operands, scope, env, emitter)
            return
        if facts.is_constant and all(x is None for x in operands):
            self.bind(eqn.outvars, [None] * len(eqn.outvars), env)
            return
        turned = None if facts.rotation is None else self.rotated(facts, facts.rotation, scope, env, emitter)
        if turned is not None:
            self.bind(eqn.outvars, [turned], env)
            return
        final_specs = [a.spec(self.specs) for a in facts.results]
        strategy = None if facts.op is None or facts.op.rule is None else self.strategies.of(facts.op)
        if strategy is None:
            needs, gives = [a.spec(self.specs) for a in facts.operands], final_specs
            steps: Sequence[Sequence[Step]] = [()] * len(final_specs)
        else:
            needs, gives, steps = strategy.operand_specs, strategy.result_specs, strategy.result_steps
            for k, path in () if strategy.is_in_place else enumerate(strategy.operand_steps):
                x, a = operands[k], facts.operands[k]
                operands[k] = x if x is None or not path else emitter.apply_steps(x, a.shape, a.itemsize, path)
        if name in xla_workarounds.AFFECTED:
            is_manual = scope is not None and bool(scope.manual)
            needs, gives, steps = self.with_workarounds(facts, operands, needs, gives, steps, is_manual, emitter)
        for k, a in enumerate(facts.operands) if None in operands else ():
            if operands[k] is None and a.is_stored:
                operands[k] = emitter.constant(emitter.local_shape(a.shape, needs[k]), a.itemsize)
        shapes = [emitter.local_shape(a.shape, spec) for a, spec in zip(facts.results, gives, strict=True)]
        results = self.emit_op(facts, operands, shapes, scope, emitter)
        for a, x, path, have, need in zip(facts.results, results, steps, gives, final_specs, strict=True):
            if a.variable is not None:
                x = emitter.apply_steps(x, a.shape, a.itemsize, path) if path else x
                x = emitter.reshard(x, a.shape, a.itemsize, path[-1].spec if path else have, need)
                is_kept = self.keeps_rounding(x, a.variable, scope)
                env[a.variable] = library_calls.kept_rounded(x, emitter) if is_kept else x

    def with_workarounds(
        self,
        facts: EquationFacts,
        operands: list[Instruction | None],
        needs: Sequence[Spec],
        gives: Sequence[Spec],
        steps: Sequence[Sequence[Step]],
        is_manual: bool,
        emitter: Emitter,
    ) -> tuple[Sequence[Spec], Sequence[Spec], Sequence[Sequence[Step]]]:
        """Operand specs, result specs and the steps after an op that XLA would compute wrongly, which this reshards."""
        shapes, found = [a.shape for a in (*facts.operands, *facts.results)], [*needs, *gives]
        safe = xla_workarounds.specs(facts.name, facts.eqn.params, shapes, found, self.sizes, is_manual=is_manual)
        found = [a if b is None else b for a, b in zip(found, safe, strict=True)]
        safe_needs, safe_gives = found[: len(needs)], found[len(needs) :]
        for k, (a, x) in enumerate(zip(facts.operands, operands, strict=True)):
            if x is not None:
                operands[k] = emitter.reshard(x, a.shape, a.itemsize, needs[k], safe_needs[k])
        pairs = zip(gives, safe_gives, steps, strict=True)
        return safe_needs, safe_gives, [() if a.axes != b.axes else path for a, b, path in pairs]

    def rotated(
        self, facts: EquationFacts, found: Rotation, scope: Scope | None, env: Env, emitter: Emitter
    ) -> Instruction | None:
        """The result of an equation that rotates an array along a sharded dim; None if it does not."""
        source, (result,) = found.cut.site[0].invars[0], facts.results
        if (x := self.read(source, env)) is None:
            return None
        shape, want = source.aval.shape, result.spec(self.specs)
        axes = want.dims[found.dim].axes
        x = emitter.reshard(x, shape, itemsize(source.aval), self.spec_of(source, scope), want)
        if not axes:
            return None
        made = {"value": result.value, "eqn": facts.eqn}
        op = LocalOp(eqn=facts.eqn, operands=[x], shape=x.shape, itemsize=x.itemsize, facts=made, emitter=emitter)
        return shard_rotation.rotated(op, found, axes, shape[found.dim])

    def keeps_rounding(self, x: Instruction, var: Any, scope: Scope | None) -> bool:
        """Whether an op's result stays rounded to 16 bits for all who read it: its sharding is constrained."""
        is_rounded = self.traits.widens_16_bits and before_rounding(x) is not x
        return (
            is_rounded
            and scope is not None
            and max(self.sizes.values(), default=1) > 1
            and self.is_constrained(var, scope)
        )

    def is_constrained(self, var: Any, scope: Scope) -> bool:
        """Whether the emitted program constrains the sharding of an op's result."""

        def exact_spec(v: Any) -> Spec | None:
            return self.program.exact_spec(scope.env[v], v.aval)

        if scope not in self.unconstrained:
            source, is_program = scope.jaxpr, scope is self.graph.scope
            known, uses = (source.invars, ()) if is_program else ((), source.outvars)
            found = redundant(scope, self.graph.makers, exact_spec, known=known, unknown_uses=uses)
            self.unconstrained[scope] = found
        return var not in self.unconstrained[scope] and exact_spec(var) is not None

    def identity(
        self, eqn: Any, operands: Sequence[Instruction | None], scope: Scope | None, env: Env, emitter: Emitter
    ) -> None:
        """Lower an op whose results are its operands, possibly resharded."""
        for atom, var, x in zip(eqn.invars, eqn.outvars, operands, strict=True):
            have, need = self.spec_of(atom, scope), self.spec_of(var, scope)
            if x is not None and self.memory_kind(atom, scope) != self.memory_kind(var, scope):
                shape, itemsize = emitter.local_shape(var.aval.shape, have), self.itemsize(var.aval)
                x = emitter.emit("copy", "unfusible", [x], shape, itemsize, value=self.graph_value(var, scope), eqn=eqn)
            if x is not None:
                x = emitter.reshard(x, var.aval.shape, self.itemsize(var.aval), have, need)
                if self.traits.widens_16_bits and eqn.primitive.name in primitive_traits.CONSTRAINTS:
                    x = library_calls.kept_rounded(x, emitter)
            if not compat.is_drop(var):
                env[var] = x

    def memory_kind(self, var: Any, scope: Scope | None) -> str | None:
        """The kind of memory that a variable is in; None is the device's."""
        value = self.graph_value(var, scope)
        return None if value is None else self.graph.memory_kinds.get(value)

    def emit_op(
        self,
        known: EquationFacts,
        operands: Sequence[Instruction | None],
        shapes: Sequence[tuple[int, ...]],
        scope: Scope | None,
        emitter: Emitter,
    ) -> list[Any]:
        """The instructions of an equation on one device, one per result."""
        eqn, name, traits = known.eqn, known.name, self.traits
        if name == "kernel_call":
            return self.emit_kernel(eqn, operands, scope, emitter)
        if name == "random_bits" and compat.is_threefry(eqn.invars[0].aval.dtype):
            name = "threefry2x32"
        present = [x for x in operands if x is not None]
        outputs = [
            (shape, a.itemsize, None if a.variable is None else a.value)
            for a, shape in zip(known.results, shapes, strict=True)
        ]
        if name in primitive_traits.COLLECTIVES:
            kind = primitive_traits.COLLECTIVES[name]
            axes = tuple(axis for axis in primitive_traits.manual_axes(eqn) if axis in self.sizes)
            facts = {"eqn": eqn, "axes": axes}
            return [
                emitter.emit(kind, "unfusible", [x] if x is not None else [], shape, itemsize, value=value, **facts)
                for x, (shape, itemsize, value) in zip(operands, outputs, strict=False)
            ]
        is_alone = traits.moves_alone and primitive_traits.dilates(eqn)
        is_window = traits.fuses_windows and name in primitive_traits.WINDOWS
        is_fusible = (primitive_traits.is_fusible(name) or is_window) and not is_alone
        if len(outputs) != 1 and not is_fusible:
            several = emitter.emit(name, "unfusible", present, (0,), 1, eqn=eqn)
            if compat.has_side_effects(eqn):
                emitter.body.effects.append(several)
            return emitter.tuple_elements(several, [(*output, eqn) for output in outputs])
        shape, itemsize, value = outputs[0]
        key = known.key_with(operands)
        facts: dict[str, Any] = {"value": value, "eqn": eqn, "key": key}
        if name in primitive_traits.RESHAPES or (name == "broadcast_in_dim" and _only_reshapes(present, shape)):
            return [emitter.emit(name, "bitcast", present, shape, itemsize, **{**facts, "key": "bitcast"})]
        if name == "dot_general":
            present = of_one_type(eqn, present, emitter)
        if name in ("slice", "split") and present:
            parts = [{**facts, "value": value, "key": key and (key, k)} for k, (_, _, value) in enumerate(outputs)]
            return [
                sliced(LocalOp(eqn=eqn, operands=present, shape=shape, itemsize=n, facts=part, emitter=emitter))
                for (shape, n, _), part in zip(outputs, parts, strict=True)
            ]
        if name in EXPANSIONS:
            op = LocalOp(eqn=eqn, operands=present, shape=shape, itemsize=itemsize, facts=facts, emitter=emitter)
            expanded = EXPANSIONS[name](op)
            if expanded is not None:
                return [expanded]
        if name == "convert_element_type" and itemsize == 4 and present:
            wide = before_rounding(present[0])
            if wide is not present[0]:
                return [wide]
        facts |= {
            "elementwise": primitive_traits.is_elementwise(name),
            "expensive": primitive_traits.is_expensive(name, eqn, traits),
            "in_place": ((0, 0),) if primitive_traits.updates(name) and operands[0] is not None else (),
            "fuses_operands": (traits.fuses_into_products and name in PRODUCTS)
            or (traits.fuses_into_scatters and name.startswith("scatter")),
            "product": matrix_product(eqn, present, itemsize) if name == "dot_general" else None,
        }
        if traits.fuses_into_scatters and name.startswith("scatter") and present[0].is_constant:
            present[0] = emitter.constant(shape, itemsize, is_shared=False)
        if traits.uses_library:
            if name.startswith("scatter") and present[0].role != "argument":
                present[0] = emitter.owned(present[0])
            if facts["elementwise"]:
                present = [stretched(x, shape, emitter) for x in present]
        if facts["elementwise"]:
            return [library_calls.arithmetic(name, present, shape, itemsize, emitter, **facts)]
        role, made = "fusible" if is_fusible else "unfusible", []
        for k, (shape, itemsize, value) in enumerate(outputs):
            facts |= {"value": value, "key": key and (key, k)}
            made.append(emitter.emit(name, role, present, shape, itemsize, **facts))
        return made

    def emit_kernel(
        self, eqn: Any, operands: Sequence[Instruction | None], scope: Scope | None, emitter: Emitter
    ) -> list[Any]:
        """The instructions of a function that each device runs on its shards."""
        pairs = zip(operands, (a.aval for a in eqn.invars), strict=True)
        stored = [emitter.constant((), self.itemsize(aval)) if x is None else x for x, aval in pairs]
        shards = [jax.ShapeDtypeStruct(x.shape, a.aval.dtype) for x, a in zip(stored, eqn.invars, strict=True)]
        results = self.inline(eqn.params["call"].outline(shards), None, stored, emitter)
        for x, v in zip(results, eqn.outvars, strict=True):
            if x is not None and x.value is None and not compat.is_drop(v):
                x.value, x.eqn = self.graph_value(v, scope), eqn
        return results


def _only_reshapes(operands: Sequence[Instruction], shape: Sequence[int]) -> bool:
    """Whether a broadcast only adds dims of size 1."""
    return len(operands) == 1 and operands[0].num_elements == math.prod(shape)


def stretched(x: Instruction, shape: Sequence[int], emitter: Emitter) -> Instruction:
    """An operand of an elementwise op with its dims of size 1 broadcast, for all ops that stretch it so."""
    if len(x.shape) != len(shape) or x.num_elements == math.prod(shape):
        return x
    return emitter.emit("broadcast_in_dim", "fusible", [x], shape, x.itemsize, key="stretched", eqn=x.eqn)
