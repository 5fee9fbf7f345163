"""Lowering of jaxpr equations to per-device instructions.

Equations are lowered in order, calls inlined. Arrays have their local shapes, padded as XLA pads them. The reshards
before an op and the reductions of partial sums after it become instructions, as the op's strategy (`rewrite`) has them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import compat
from ..graph import CALLS, Graph, Op, Scope
from ..propagation import Assignment
from ..rewrite import xla_workarounds
from ..rewrite.bfloat16_propagation import PRODUCTS, narrow_reshards, rounded_values
from ..rewrite.constraint_emitter import AssignedProgram
from ..rewrite.op_strategy import OpStrategies, operand_steps
from ..rewrite.redundant_constraints import redundant
from ..rewrite.reshard import Step
from ..rewrite.rotation import rotations
from ..spec import Spec, closed_spec
from . import library_calls, primitive_traits, shard_rotation
from .compiler_traits import CompilerTraits
from .emitter import Cursor, Emitter, before_rounding
from .expansions import EXPANSIONS, sliced
from .instruction import Instruction, Phase
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
        self.strategies = OpStrategies(assignment)
        self.program = AssignedProgram(assignment, jax.sharding.AbstractMesh((*self.sizes.values(),), (*self.sizes,)))
        self.rotations = rotations(self.graph)
        self.unconstrained: dict[Scope, set[Any]] = {}
        """Scope -> the variables whose constraints are left out."""
        self.cursor = Cursor()
        if traits.rounds_early:
            self.cursor.rounded = rounded = rounded_values(self.graph)
            steps = functools.partial(operand_steps, assignment, self.strategies)
            moves = narrow_reshards(self.graph, self.strategies, steps, rounded)
            self.cursor.rounded_moves = {move for move in moves if self.graph.dtype_names[move[0]] == "float32"}

    def spec_of(self, var: Any, scope: Scope | None) -> Spec:
        """The spec of a variable; in manual code its shape is already local, so nothing is sharded."""
        value = self.graph_value(var, scope)
        return self.specs[value] if value is not None else closed_spec(len(var.aval.shape))

    def itemsize(self, aval: Any) -> float:
        """Bytes per element on the device, those of a PRNG key included; an array of the host has none."""
        return 0 if compat.is_on_host(aval) else primitive_traits.element_bytes(aval.dtype)

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
            name = eqn.primitive.name
            self.cursor.phase, self.cursor.eqn = phase(eqn, outer), eqn
            if name in CALLS:
                self.inline_call(i, eqn, scope, env, emitter)
            elif name in self.handlers:
                self.handlers[name](self, i, eqn, scope, env, emitter)
            else:
                self.lower_equation(i, eqn, scope, env, emitter)
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

    def op_of(self, i: int, eqn: Any, scope: Scope | None) -> Op | None:
        """The graph's op of an equation, if both have the same operands and results."""
        if scope is not None and i in scope.opaque:
            return scope.opaque[i]
        for var in eqn.outvars:
            value = None if compat.is_drop(var) else self.graph_value(var, scope)
            if value is not None:
                op = self.graph.makers.get(value)
                has_all = op is not None and len(op.operands) == len(eqn.invars) and len(op.results) == len(eqn.outvars)
                return op if op is not None and has_all and op.site and op.site[0] is eqn else None
        return None

    def lower_equation(self, i: int, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
        """Lower an equation without a body."""
        name = eqn.primitive.name
        operands = [self.read(a, env) for a in eqn.invars]
        if name in primitive_traits.IDENTITIES:
            if name == primitive_traits.BARRIER:
                operands = self.optimization_barrier(eqn, operands, emitter)
            self.identity(eqn, operands, scope, env, emitter)
            return
        if all(x is None for x in operands) and self.is_constant(eqn, scope):
            self.bind(eqn.outvars, [None] * len(eqn.outvars), env)
            return
        if (turned := self.rotated(eqn, scope, env, emitter)) is not None:
            self.bind(eqn.outvars, [turned], env)
            return
        operand_specs = [self.spec_of(a, scope) for a in eqn.invars]
        final_specs = result_specs = [self.spec_of(v, scope) for v in eqn.outvars]
        steps: list[Sequence[Step]] = [()] * len(result_specs)
        op = self.op_of(i, eqn, scope)
        if op is not None and op.rule is not None:
            strategy = self.strategies.of(op)
            steps = list(strategy.result_steps)
            operands = [
                emitter.apply_steps(x, a.aval.shape, self.itemsize(a.aval), path) if path and x is not None else x
                for x, a, path in zip(operands, eqn.invars, strategy.operand_steps, strict=True)
            ]
            operand_specs, result_specs = strategy.operand_specs, strategy.result_specs
        needs, gives = operand_specs, result_specs
        if name in xla_workarounds.AFFECTED:
            shapes, found = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)], [*needs, *gives]
            is_manual = scope is not None and bool(scope.manual)
            safe = xla_workarounds.specs(name, eqn.params, shapes, found, self.sizes, is_manual=is_manual)
            found = [a if b is None else b for a, b in zip(found, safe, strict=True)]
            needs, gives = found[: len(needs)], found[len(needs) :]
            steps = [() if a.axes != b.axes else path for a, b, path in zip(result_specs, gives, steps, strict=True)]
        operands = [
            x if x is None else emitter.reshard(x, a.aval.shape, self.itemsize(a.aval), have, need)
            for a, x, have, need in zip(eqn.invars, operands, operand_specs, needs, strict=True)
        ]
        for k, (atom, x) in enumerate(zip(eqn.invars, operands, strict=True)):
            if x is None and primitive_traits.stores_constant(name, atom.aval.shape):
                shape = emitter.local_shape(atom.aval.shape, needs[k])
                operands[k] = emitter.constant(shape, self.itemsize(atom.aval))
        shapes = [emitter.local_shape(v.aval.shape, spec) for v, spec in zip(eqn.outvars, gives, strict=True)]
        results = self.emit_op(eqn, operands, shapes, scope, emitter)
        for var, x, path, have, need in zip(eqn.outvars, results, steps, gives, final_specs, strict=True):
            if not compat.is_drop(var):
                shape, itemsize = var.aval.shape, self.itemsize(var.aval)
                x = emitter.apply_steps(x, shape, itemsize, path)
                x = emitter.reshard(x, shape, itemsize, path[-1].spec if path else have, need)
                env[var] = library_calls.kept_rounded(x, emitter) if self.keeps_rounding(x, var, scope) else x

    def rotated(self, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> Instruction | None:
        """The result of an equation that rotates an array along a sharded dim; None if it does not."""
        if len(eqn.outvars) != 1 or compat.is_drop(eqn.outvars[0]):
            return None
        (var,) = eqn.outvars
        value = self.graph_value(var, scope)
        found = None if value is None else self.rotations.get(value)
        if found is None:
            return None
        source = found.cut.site[0].invars[0]
        if (x := self.read(source, env)) is None:
            return None
        shape, want = source.aval.shape, self.spec_of(var, scope)
        axes = want.dims[found.dim].axes
        x = emitter.reshard(x, shape, self.itemsize(source.aval), self.spec_of(source, scope), want)
        if not axes:
            return None
        facts = {"value": value, "eqn": eqn}
        op = LocalOp(eqn=eqn, operands=[x], shape=x.shape, itemsize=x.itemsize, facts=facts, emitter=emitter)
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

    def is_constant(self, eqn: Any, scope: Scope | None) -> bool:
        """Whether the results are constants, which each user recomputes."""
        if scope is None:
            return primitive_traits.is_fusible(eqn.primitive.name)
        return all(compat.is_drop(v) or self.graph_value(v, scope) is None for v in eqn.outvars)

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
        eqn: Any,
        operands: Sequence[Instruction | None],
        shapes: Sequence[tuple[int, ...]],
        scope: Scope | None,
        emitter: Emitter,
    ) -> list[Any]:
        """The instructions of an equation on one device, one per result."""
        name, traits = eqn.primitive.name, self.traits
        if name == "kernel_call":
            return self.emit_kernel(eqn, operands, scope, emitter)
        if name == "random_bits" and compat.is_threefry(eqn.invars[0].aval.dtype):
            name = "threefry2x32"
        present = [x for x in operands if x is not None]
        outputs = [
            (shape, self.itemsize(v.aval), None if compat.is_drop(v) else self.graph_value(v, scope))
            for v, shape in zip(eqn.outvars, shapes, strict=True)
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
            results = emitter.emit(name, "unfusible", present, (0,), 1, eqn=eqn)
            if compat.has_side_effects(eqn):
                emitter.body.effects.append(results)
            return emitter.tuple_elements(results, [(*output, eqn) for output in outputs])
        shape, itemsize, value = outputs[0]
        key = _key(eqn, operands)
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
        op = LocalOp(eqn=eqn, operands=present, shape=shape, itemsize=itemsize, facts=facts, emitter=emitter)
        expanded = EXPANSIONS[name](op) if name in EXPANSIONS else None
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


def _key(eqn: Any, operands: Sequence[Instruction | None]) -> Any:
    """What equal equations share besides their operands; None where equality can't be decided."""
    literals = tuple(str(a.val) if compat.is_literal(a) else None for a in eqn.invars)
    if any(x is None and literal is None for x, literal in zip(operands, literals, strict=True)):
        return None
    params = tuple(v for p, v in eqn.params.items() if p not in ("sharding", "out_sharding"))
    try:
        hash(params)
    except TypeError:
        return None
    return (params, literals)


def phase(eqn: Any, outer: Phase) -> Phase:
    """The pass of a gradient that an equation belongs to, by the transformations in its name stack."""
    stack = compat.name_stack(eqn)
    if outer == "backward" or "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else outer
