"""Lowering of jaxpr equations to per-device instructions.

Equations are lowered in order, calls inlined. Arrays have their local shapes, padded as XLA pads them. The reshards
before an op and the reductions of partial sums after it become instructions, as the op's strategy (`rewrite`) has them.
Operands of dots and convolutions are transposed to the dim order that XLA:CPU's libraries take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import compat
from ..graph import CALLS, Graph, Op, Scope
from ..propagation import Assignment
from ..rewrite import xla_workarounds
from ..rewrite.op_strategy import OpStrategies
from ..spec import Spec, closed_spec
from . import cpu_arithmetic, cpu_dot_layouts, cpu_library_reductions, primitive_traits, simplified_algebra, threefry
from .compiler_traits import CompilerTraits
from .emitter import Cursor, Emitter
from .instruction import Instruction, Phase

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
        self.cursor = Cursor()

    def spec_of(self, var: Any, scope: Scope | None) -> Spec:
        """The spec of a variable; in manual code its shape is already local, so nothing is sharded."""
        value = self.graph_value(var, scope)
        return self.specs[value] if value is not None else closed_spec(len(var.aval.shape))

    def itemsize(self, aval: Any) -> int:
        """Bytes per element; a PRNG key is two words of 32 bits."""
        if compat.is_extended(aval.dtype):
            return 8
        return int(np.dtype(aval.dtype).itemsize)

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
            self.cursor.phase = phase(eqn, outer)
            if name in CALLS:
                self.inline_call(i, eqn, scope, env, emitter)
            elif name in self.handlers:
                self.handlers[name](self, i, eqn, scope, env, emitter)
            else:
                self.lower_equation(eqn, scope, env, emitter)
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

    def op_of(self, eqn: Any, scope: Scope | None) -> Op | None:
        """The graph's op of an equation, if both have the same operands and results."""
        for var in eqn.outvars:
            value = None if compat.is_drop(var) else self.graph_value(var, scope)
            if value is not None:
                op = self.graph.makers.get(value)
                return op if op is not None and op.site and op.site[0] is eqn and _has_all_arrays(op, eqn) else None
        return None

    def lower_equation(self, eqn: Any, scope: Scope | None, env: Env, emitter: Emitter) -> None:
        """Lower an equation without a body."""
        name = eqn.primitive.name
        operands = [self.read(a, env) for a in eqn.invars]
        if name in primitive_traits.IDENTITIES or name in ("annotate", "sharding_constraint", primitive_traits.BARRIER):
            if name == primitive_traits.BARRIER:
                operands = self.optimization_barrier(eqn, operands, emitter)
            self.identity(eqn, operands, scope, env, emitter)
            return
        if all(x is None for x in operands) and self.is_constant(eqn, scope):
            self.bind(eqn.outvars, [None] * len(eqn.outvars), env)
            return
        operand_specs = [self.spec_of(a, scope) for a in eqn.invars]
        result_specs = [self.spec_of(v, scope) for v in eqn.outvars]
        final_specs, steps = result_specs, [()] * len(result_specs)
        op = self.op_of(eqn, scope)
        if op is not None and op.rule is not None:
            strategy = self.strategies.of(op)
            steps = strategy.result_steps
            pairs = zip(operands, eqn.invars, strategy.operand_steps, strict=True)
            operands = [
                None if x is None else emitter.apply_steps(x, a.aval.shape, self.itemsize(a.aval), path)
                for x, a, path in pairs
            ]
            operand_specs, result_specs = list(strategy.operand_specs), list(strategy.result_specs)
        elif op is not None:  # no rule: XLA runs it on replicated arrays
            replicated = [closed_spec(len(v.aval.shape)) for v in (*eqn.invars, *eqn.outvars)]
            operands = self.reshard_operands(
                eqn.invars, operands, operand_specs, replicated[: len(operand_specs)], emitter
            )
            operand_specs, result_specs = replicated[: len(operand_specs)], replicated[len(operand_specs) :]
        if name in xla_workarounds.AFFECTED:
            new_operand_specs, new_result_specs = self.workaround_specs(eqn, scope, operand_specs, result_specs)
            operands = self.reshard_operands(eqn.invars, operands, operand_specs, new_operand_specs, emitter)
            steps = [
                () if a.axes != b.axes else path
                for a, b, path in zip(result_specs, new_result_specs, steps, strict=True)
            ]
            operand_specs, result_specs = new_operand_specs, new_result_specs
        for k, (atom, x, need) in enumerate(zip(eqn.invars, operands, operand_specs, strict=True)):
            if x is None and primitive_traits.stores_constant(name, atom.aval.shape):
                operands[k] = emitter.constant(emitter.local_shape(atom.aval.shape, need), self.itemsize(atom.aval))
        shapes = [emitter.local_shape(v.aval.shape, spec) for v, spec in zip(eqn.outvars, result_specs, strict=True)]
        results = self.emit_op(eqn, operands, shapes, scope, emitter)
        for var, x, spec, path, final in zip(eqn.outvars, results, result_specs, steps, final_specs, strict=True):
            shape, itemsize = var.aval.shape, self.itemsize(var.aval)
            x = emitter.apply_steps(x, shape, itemsize, path)
            if not compat.is_drop(var):
                env[var] = emitter.reshard(x, shape, itemsize, path[-1].spec if path else spec, final)

    def reshard_operands(
        self,
        atoms: Sequence[Any],
        operands: Sequence[Instruction | None],
        haves: Sequence[Spec],
        needs: Sequence[Spec],
        emitter: Emitter,
    ) -> list[Instruction | None]:
        """Operands resharded from the specs they have to those the op needs."""
        return [
            None if x is None else emitter.reshard(x, a.aval.shape, self.itemsize(a.aval), have, need)
            for a, x, have, need in zip(atoms, operands, haves, needs, strict=True)
        ]

    def workaround_specs(
        self, eqn: Any, scope: Scope | None, operand_specs: Sequence[Spec], result_specs: Sequence[Spec]
    ) -> tuple[list[Spec], list[Spec]]:
        """The specs that an op runs with where XLA miscompiles it with the given ones."""
        specs = [*operand_specs, *result_specs]
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        is_manual = scope is not None and bool(scope.manual)
        overrides = xla_workarounds.specs(
            eqn.primitive.name, eqn.params, shapes, specs, self.sizes, is_manual=is_manual
        )
        found = [have if need is None else need for have, need in zip(specs, overrides, strict=True)]
        return found[: len(operand_specs)], found[len(operand_specs) :]

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
            if x is not None:
                have, need = self.spec_of(atom, scope), self.spec_of(var, scope)
                x = emitter.reshard(x, var.aval.shape, self.itemsize(var.aval), have, need)
            if not compat.is_drop(var):
                env[var] = x

    def emit_op(
        self,
        eqn: Any,
        operands: list[Instruction | None],
        shapes: list[tuple[int, ...]],
        scope: Scope | None,
        emitter: Emitter,
    ) -> list[Instruction]:
        """The instructions of an equation on one device, one per result."""
        name = eqn.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            return [self.dot_or_conv(eqn, operands, shapes[0], scope, emitter)]
        present, is_library_reduction = [x for x in operands if x is not None], False
        itemsizes = [self.itemsize(v.aval) for v in eqn.outvars]
        values = [self.graph_value(v, scope) if not compat.is_drop(v) else None for v in eqn.outvars]
        if self.is_view(name, present, shapes[0]):
            return [
                emitter.emit(
                    name,
                    "bitcast",
                    present,
                    shapes[0],
                    itemsizes[0],
                    key=("bitcast", eqn.params.get("permutation")),
                    value=values[0],
                    eqn=eqn,
                )
            ]
        if (
            name == "div"
            and len(present) == 2
            and present[1].name == "broadcast_in_dim"
            and cpu_arithmetic.is_float(eqn)
        ):
            return [cpu_arithmetic.divide_by_broadcast(eqn, present, values[0], emitter)]
        if name in primitive_traits.REDUCTIONS and self.traits.reduces_in_rounds:
            is_library_reduction = self.is_library_reduction(eqn, present[0])
            present = present if is_library_reduction else [self.reduce_window(eqn, present[0], emitter)]
        outputs = list(enumerate(zip(shapes, itemsizes, values, strict=True)))
        if name in primitive_traits.COLLECTIVES:
            kind = primitive_traits.COLLECTIVES[name]
            return [
                emitter.emit(
                    kind,
                    "unfusible",
                    [x for x in operands[k : k + 1] if x is not None],
                    shape,
                    itemsize,
                    value=v,
                    eqn=eqn,
                )
                for k, (shape, itemsize, v) in outputs
            ]
        if (
            self.traits.widens_16_bits
            and primitive_traits.is_elementwise(name)
            and name not in primitive_traits.CONVERSIONS
            and len(shapes) == 1
            and cpu_arithmetic.is_bf16(eqn)
        ):
            return [cpu_arithmetic.in_f32(eqn, operands, shapes[0], values[0], emitter)]
        if (
            name == "convert_element_type"
            and present
            and itemsizes[0] == 4
            and (wide := cpu_arithmetic.before_rounding(present[0])) is not present[0]
        ):
            return [wide]
        facts = {"key": cpu_arithmetic.cse_key(eqn, operands, 0), "value": values[0], "eqn": eqn}
        if (simplified := simplified_algebra.scattered_sum(eqn, present, facts, emitter)) is not None:
            return [simplified]
        if threefry.makes_bits(eqn):
            return [threefry.random_bits(eqn, present, shapes[0], itemsizes[0], values[0], emitter)]
        if primitive_traits.is_fusible(name):
            facts = {
                "eqn": eqn,
                "in_place": _in_place(name, operands),
                "elementwise": primitive_traits.is_elementwise(name),
                "expensive": primitive_traits.is_expensive(name, eqn, self.traits),
                "reuses_operand": name in primitive_traits.REUSES_OPERAND,
                "is_library_reduction": is_library_reduction,
            }
            return [
                emitter.emit(
                    name,
                    "fusible",
                    present,
                    shape,
                    itemsize,
                    key=cpu_arithmetic.cse_key(eqn, operands, k),
                    value=v,
                    **facts,
                )
                for k, (shape, itemsize, v) in outputs
            ]
        if len(shapes) == 1:
            facts = {"value": values[0], "eqn": eqn, "in_place": _in_place(name, operands)}
            key = cpu_arithmetic.cse_key(eqn, operands, 0)
            return [emitter.emit(name, "unfusible", present, shapes[0], itemsizes[0], key=key, **facts)]
        results = emitter.emit(name, "unfusible", present, (0,), 1, eqn=eqn)
        return emitter.tuple_elements(results, [(*output, eqn) for _, output in outputs])

    def dot_or_conv(
        self, eqn: Any, given: list[Instruction | None], shape: tuple[int, ...], scope: Scope | None, emitter: Emitter
    ) -> Instruction:
        """A dot or a convolution, its operands transposed for the library."""
        (var,) = eqn.outvars
        name, value, key = eqn.primitive.name, self.graph_value(var, scope), cpu_arithmetic.cse_key(eqn, given, 0)
        operands = [x for x in given if x is not None]
        itemsize = self.itemsize(var.aval)
        if name == "dot_general":
            facts = {"key": key, "value": value, "eqn": eqn}
            simplified = simplified_algebra.product(eqn, operands, shape, itemsize, facts, emitter)
            if simplified is not None:
                return simplified
        if not self.traits.transposes_operands:
            return emitter.emit(name, "unfusible", operands, shape, itemsize, key=key, value=value, eqn=eqn)
        if name == "dot_general":
            if (
                self.traits.widens_16_bits
                and cpu_arithmetic.is_bf16(eqn)
                and cpu_dot_layouts.runs_in_f32(eqn, operands)
            ):
                stored = cpu_dot_layouts.dot_operands(
                    eqn, [cpu_arithmetic.widened_to_f32(x, emitter) for x in operands], emitter
                )
                wide = emitter.emit(name, "unfusible", stored, shape, 4, key=key, value=value, eqn=eqn)
                return cpu_arithmetic.rounded_to_bf16(wide, emitter)
            stored = cpu_dot_layouts.dot_operands(eqn, operands, emitter)
            return emitter.emit(name, "unfusible", stored, shape, itemsize, key=key, value=value, eqn=eqn)
        stored, order = cpu_dot_layouts.conv_operands(eqn, operands, emitter), cpu_dot_layouts.conv_order(eqn)
        made = emitter.emit(
            name, "unfusible", stored, [shape[d] for d in order], itemsize, key=key, value=value, eqn=eqn
        )
        return cpu_dot_layouts.transposed(made, [order.index(d) for d in range(len(order))], emitter)

    def is_view(self, name: str, operands: Sequence[Instruction], shape: Sequence[int]) -> bool:
        """Whether the result is the operand under another shape, as where a dim of size 1 is summed or added."""
        if name in primitive_traits.RESHAPES or self.traits.transposes_operands:
            return name in primitive_traits.RESHAPES
        if name in primitive_traits.REDUCTIONS or name == "broadcast_in_dim":
            return len(operands) == 1 and operands[0].num_elements == math.prod(shape)
        return name == "transpose"

    def is_library_reduction(self, eqn: Any, x: Instruction) -> bool:
        """Whether XLA:CPU hands a reduction to its library."""
        known = eqn.primitive.name in ("reduce_max", "reduce_min", "reduce_sum")
        return (
            known
            and str(eqn.outvars[0].aval.dtype) == "float32"
            and x.num_elements >= cpu_library_reductions.MIN_ELEMENTS
        )

    def reduce_window(self, eqn: Any, x: Instruction, emitter: Emitter) -> Instruction:
        """The windowed first round of a reduction over a long dim (`TreeReductionRewriter`)."""
        axes = eqn.params["axes"]
        if all(x.shape[d] <= primitive_traits.TREE_REDUCTION_WINDOW for d in axes):
            return x
        shape = [
            -(-n // min(n, primitive_traits.TREE_REDUCTION_WINDOW)) if d in axes else n for d, n in enumerate(x.shape)
        ]
        return emitter.emit(
            "reduce_window", "unfusible", [x], shape, self.itemsize(eqn.invars[0].aval), key=eqn.primitive.name, eqn=eqn
        )


def phase(eqn: Any, outer: Phase) -> Phase:
    """The pass of a gradient that an equation belongs to, by the transformations in its name stack."""
    stack = compat.name_stack(eqn)
    if outer == "backward" or "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else outer


def _has_all_arrays(op: Op, eqn: Any) -> bool:
    return len(op.operands) == len(eqn.invars) and len(op.results) == len(eqn.outvars)


def _in_place(name: str, operands: Sequence[Instruction | None]) -> tuple[tuple[int, int], ...]:
    if name == "dynamic_update_slice" or name.startswith("scatter"):
        return ((0, 0),) if operands[0] is not None else ()
    return ()
