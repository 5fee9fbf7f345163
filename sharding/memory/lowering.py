"""A completed program as one device runs it: an `Assignment` in, instructions out.

The program is walked equation by equation, bodies of calls in place. Arrays have the shape that one device holds,
padded as XLA pads; where an op needs its operands split otherwise, or leaves sums, the steps that were decided
(`decision.py`, `limits.py`) are there as instructions. Dots and convolutions get their operands in the order of dims
that XLA:CPU's libraries take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import compat, limits
from ..decision import Decisions
from ..graph import CALLS, Graph, Op, Scope
from ..propagation import Assignment
from ..spec import Spec, closed_spec, divisible
from . import arithmetic, library, primitives, products
from .emitter import Emitter, Place
from .instruction import Body, Instruction, Phase

Env = dict[Any, Instruction | None]
"""Variable -> what makes it; None for a constant expression, which every use makes for itself."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceProgram:
    """What one device runs, with its arguments and results."""

    body: Body
    inputs: tuple[Instruction, ...]
    outputs: tuple[Instruction, ...]


Handler = Callable[["Lowering", int, Any, "Scope | None", Env, Emitter], None]
"""(lowering, the equation's place, the equation, its scope, what variables are made by, where to) -> None."""


class Lowering:
    """Equations to instructions; those with bodies that are no plain calls go to the handlers it is given."""

    def __init__(self, assignment: Assignment, handlers: Mapping[str, Handler], platform: str):
        self.handlers = handlers
        self.has_half_dots = platform != "cpu"
        """Whether all dots of 16-bit floats run as such."""
        self.graph: Graph = assignment.graph
        self.sizes = assignment.sizes
        self.specs = assignment.specs
        self.decisions = Decisions(assignment)
        self.place = Place()

    def program(self) -> DeviceProgram:
        """The whole program."""
        g, to = self.graph, Emitter(self.sizes, self.place)
        scope = g.scope
        assert scope is not None
        env: Env = dict.fromkeys(scope.jaxpr.constvars)
        inputs = []
        for var, v in zip(scope.jaxpr.invars, g.inputs, strict=True):
            spec = self.boundary(v)
            x = to.argument(to.local(g.shapes[v], spec), self.width(var.aval), v)
            inputs.append(x)
            env[var] = to.resplit(x, g.shapes[v], self.width(var.aval), spec, self.specs[v])
        self.equations(scope.jaxpr, scope, env, to)
        outputs = []
        for atom, v in zip(scope.jaxpr.outvars, g.outputs, strict=True):
            spec, width = self.boundary(v), self.width(atom.aval)
            x = self.read(atom, env)
            if x is None:
                x = to.constant(to.local(g.shapes[v], spec), width)
            else:
                x = to.resplit(x, g.shapes[v], width, self.spec_of(atom, scope), spec)
            outputs.append(x)
        to.body.results = outputs
        return DeviceProgram(to.body, tuple(inputs), tuple(outputs))

    def boundary(self, v: int) -> Spec:
        """How an argument or result is split."""
        return divisible(self.specs[v], self.graph.shapes[v], self.sizes)

    def spec_of(self, var: Any, scope: Scope | None) -> Spec:
        """How a variable is split; in manual code each is a device's own."""
        atom = self.value(var, scope)
        return self.specs[atom] if atom is not None else closed_spec(len(var.aval.shape))

    def width(self, aval: Any) -> int:
        """Bytes of an element; a random key is two words of 32 bits."""
        if compat.is_extended(aval.dtype):
            return 8
        return int(np.dtype(aval.dtype).itemsize)

    def read(self, atom: Any, env: Env) -> Instruction | None:
        """What makes an atom; None for constants."""
        return None if compat.is_literal(atom) else env.get(atom)

    def value(self, var: Any, scope: Scope | None) -> int | None:
        """The graph's value of a variable."""
        return None if scope is None or compat.is_literal(var) else scope.env.get(var)

    def equations(self, jaxpr: Any, scope: Scope | None, env: Env, to: Emitter) -> None:
        """All equations of a jaxpr."""
        around = self.place.phase
        for i, eqn in enumerate(jaxpr.eqns):
            name = eqn.primitive.name
            self.place.phase = phase(eqn, around)
            if name in CALLS:
                self.call(i, eqn, scope, env, to)
            elif name in self.handlers:
                self.handlers[name](self, i, eqn, scope, env, to)
            else:
                self.plain(eqn, scope, env, to)
        self.place.phase = around

    def call(self, i: int, eqn: Any, scope: Scope | None, env: Env, to: Emitter) -> None:
        """A body that runs once, in place."""
        key, pos, jaxpr = next(compat.sub_jaxprs(eqn.params))
        child = scope.children.get((i, key, pos)) if scope is not None else None
        operands = [self.read(a, env) for a in eqn.invars]
        if eqn.params.get("differentiated") and np.any(eqn.params.get("prevent_cse", False)):
            operands = self.together(eqn, operands, to)
        self.bind(eqn.outvars, self.inlined(jaxpr, child, operands, to), env)

    def together(self, eqn: Any, operands: Sequence[Instruction | None], to: Emitter) -> list[Instruction | None]:
        """Operands none of which is there before all are: what is recomputed waits for the backward pass."""
        there = [x for x in operands if x is not None]
        whole = to.emit(primitives.BARRIER, "library", there, (0,), 1, eqn=eqn)
        whole.in_place = tuple((k, k) for k in range(len(there)))
        parts = iter(to.parts(whole, [(x.shape, x.width, x.value, x.eqn) for x in there]))
        return [None if x is None else next(parts) for x in operands]

    def inlined(self, jaxpr: Any, child: Scope | None, operands: Sequence[Instruction | None], to: Emitter) -> list:
        """The results of a body that runs in place."""
        body = compat.open_jaxpr(jaxpr)
        inner: Env = dict.fromkeys(body.constvars)
        inner.update(zip(body.invars, operands, strict=True))
        self.equations(body, child, inner, to)
        return [self.read(a, inner) for a in body.outvars]

    def bind(self, variables: Sequence[Any], made: Sequence[Instruction | None], env: Env) -> None:
        """Names what was made."""
        env.update((v, x) for v, x in zip(variables, made, strict=True) if not compat.is_drop(v))

    def op_of(self, eqn: Any, scope: Scope | None) -> Op | None:
        """The graph's op of an equation, if it is of the same arrays."""
        for var in eqn.outvars:
            atom = None if compat.is_drop(var) else self.value(var, scope)
            if atom is not None:
                op = self.graph.makers.get(atom)
                return op if op is not None and op.site and op.site[0] is eqn and _is_whole(op, eqn) else None
        return None

    def plain(self, eqn: Any, scope: Scope | None, env: Env, to: Emitter) -> None:
        """Any equation without a body."""
        name = eqn.primitive.name
        operands = [self.read(a, env) for a in eqn.invars]
        if name in primitives.PASSED or name in ("annotate", "sharding_constraint", primitives.BARRIER):
            operands = self.together(eqn, operands, to) if name == primitives.BARRIER else operands
            self.passed(eqn, operands, scope, env, to)
            return
        if all(x is None for x in operands) and self.is_constant(eqn, scope):
            self.bind(eqn.outvars, [None] * len(eqn.outvars), env)
            return
        needs = [self.spec_of(a, scope) for a in eqn.invars]
        made = [self.spec_of(v, scope) for v in eqn.outvars]
        wants, steps = made, [()] * len(made)
        op = self.op_of(eqn, scope)
        if op is not None and op.rule is not None:
            decision = self.decisions.of(op)
            steps = decision.results
            pairs = zip(operands, eqn.invars, decision.operands, strict=True)
            operands = [
                None if x is None else to.walked(x, a.aval.shape, self.width(a.aval), way) for x, a, way in pairs
            ]
            needs, made = list(decision.needs), list(decision.runs_as)
        elif op is not None:  # nothing is known of it: on whole arrays
            whole = [closed_spec(len(v.aval.shape)) for v in (*eqn.invars, *eqn.outvars)]
            operands = self.resplit(eqn.invars, operands, needs, whole[: len(needs)], to)
            needs, made = whole[: len(needs)], whole[len(needs) :]
        if name in limits.NAMES:
            needed, lying = self.limited(eqn, scope, needs, made)
            operands = self.resplit(eqn.invars, operands, needs, needed, to)
            steps = [() if a.axes != b.axes else way for a, b, way in zip(made, lying, steps, strict=True)]
            needs, made = needed, lying
        for k, (atom, x, need) in enumerate(zip(eqn.invars, operands, needs, strict=True)):
            if x is None and primitives.is_stored_for(name, atom.aval.shape):
                operands[k] = to.constant(to.local(atom.aval.shape, need), self.width(atom.aval))
        shapes = [to.local(v.aval.shape, spec) for v, spec in zip(eqn.outvars, made, strict=True)]
        results = self.instructions(eqn, operands, shapes, scope, to)
        for var, x, have, way, want in zip(eqn.outvars, results, made, steps, wants, strict=True):
            shape, width = var.aval.shape, self.width(var.aval)
            x = to.walked(x, shape, width, way)
            if not compat.is_drop(var):
                env[var] = to.resplit(x, shape, width, way[-1].spec if way else have, want)

    def resplit(
        self,
        atoms: Sequence[Any],
        operands: Sequence[Instruction | None],
        haves: Sequence[Spec],
        needs: Sequence[Spec],
        to: Emitter,
    ) -> list[Instruction | None]:
        """Operands split otherwise."""
        return [
            None if x is None else to.resplit(x, a.aval.shape, self.width(a.aval), have, need)
            for a, x, have, need in zip(atoms, operands, haves, needs, strict=True)
        ]

    def limited(
        self, eqn: Any, scope: Scope | None, needs: Sequence[Spec], made: Sequence[Spec]
    ) -> tuple[list[Spec], list[Spec]]:
        """The splits of an op's arrays while it runs, where XLA computes it wrongly as they are."""
        specs = [*needs, *made]
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        is_manual = scope is not None and bool(scope.manual)
        limited = limits.specs(eqn.primitive.name, eqn.params, shapes, specs, self.sizes, is_manual=is_manual)
        found = [have if need is None else need for have, need in zip(specs, limited, strict=True)]
        return found[: len(needs)], found[len(needs) :]

    def is_constant(self, eqn: Any, scope: Scope | None) -> bool:
        """Whether the results are made anew for each use."""
        if scope is None:
            return primitives.is_loop(eqn.primitive.name)
        return all(compat.is_drop(v) or self.value(v, scope) is None for v in eqn.outvars)

    def passed(
        self, eqn: Any, operands: Sequence[Instruction | None], scope: Scope | None, env: Env, to: Emitter
    ) -> None:
        """Results that are the operands, perhaps split otherwise."""
        for atom, var, x in zip(eqn.invars, eqn.outvars, operands, strict=True):
            if x is not None:
                have, need = self.spec_of(atom, scope), self.spec_of(var, scope)
                x = to.resplit(x, var.aval.shape, self.width(var.aval), have, need)
            if not compat.is_drop(var):
                env[var] = x

    def instructions(
        self,
        eqn: Any,
        operands: list[Instruction | None],
        shapes: list[tuple[int, ...]],
        scope: Scope | None,
        to: Emitter,
    ) -> list[Instruction]:
        """The instructions of one equation on one device; one result each."""
        name = eqn.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            return [self.product(eqn, [x for x in operands if x is not None], shapes[0], scope, to)]
        there, by_library = [x for x in operands if x is not None], False
        widths = [self.width(v.aval) for v in eqn.outvars]
        values = [self.value(v, scope) if not compat.is_drop(v) else None for v in eqn.outvars]
        if name in primitives.RESHAPES:
            return [to.emit(name, "view", there, shapes[0], widths[0], key="view", value=values[0], eqn=eqn)]
        if name == "div" and len(there) == 2 and there[1].name == "broadcast_in_dim" and arithmetic.is_float(eqn):
            return [arithmetic.by_reciprocal(eqn, there, values[0], to)]
        if name in primitives.REDUCTIONS:
            by_library = self.is_by_library(eqn, there[0])
            there = there if by_library else [self.windowed(eqn, there[0], to)]
        several = list(enumerate(zip(shapes, widths, values, strict=True)))
        if name in primitives.COLLECTIVES:
            kind = primitives.COLLECTIVES[name]
            return [
                to.emit(
                    kind, "library", [x for x in operands[k : k + 1] if x is not None], shape, width, value=v, eqn=eqn
                )
                for k, (shape, width, v) in several
            ]
        if (
            primitives.is_elementwise(name)
            and name != "convert_element_type"
            and len(shapes) == 1
            and arithmetic.is_half(eqn)
        ):
            return [arithmetic.in_single(eqn, operands, shapes[0], values[0], to)]
        if (
            name == "convert_element_type"
            and there
            and widths[0] == 4
            and (wide := arithmetic.single(there[0])) is not there[0]
        ):
            return [wide]
        if primitives.is_loop(name):
            facts = {
                "eqn": eqn,
                "in_place": _in_place(name, operands),
                "elementwise": primitives.is_elementwise(name),
                "expensive": primitives.is_expensive(name, eqn),
                "reuses": name in primitives.REUSES,
                "by_library": by_library,
            }
            return [
                to.emit(name, "loop", there, shape, width, key=arithmetic.key_of(eqn, operands, k), value=v, **facts)
                for k, (shape, width, v) in several
            ]
        if len(shapes) == 1:
            facts = {"value": values[0], "eqn": eqn, "in_place": _in_place(name, operands)}
            key = arithmetic.key_of(eqn, operands, 0)
            return [to.emit(name, "library", there, shapes[0], widths[0], key=key, **facts)]
        whole = to.emit(name, "library", there, (0,), 1, eqn=eqn)
        return to.parts(whole, [(*known, eqn) for _, known in several])

    def product(
        self, eqn: Any, operands: list[Instruction], shape: tuple[int, ...], scope: Scope | None, to: Emitter
    ) -> Instruction:
        """A dot or a convolution."""
        (var,) = eqn.outvars
        name, value, key = eqn.primitive.name, self.value(var, scope), arithmetic.key_of(eqn, operands, 0)
        width = self.width(var.aval)
        if name == "dot_general":
            if not self.has_half_dots and arithmetic.is_half(eqn) and products.runs_in_single(eqn, operands):
                stored = products.dot_operands(eqn, [arithmetic.widened(x, to) for x in operands], to)
                wide = to.emit(name, "library", stored, shape, 4, key=key, value=value, eqn=eqn)
                return arithmetic.rounded(wide, to)
            stored = products.dot_operands(eqn, operands, to)
            return to.emit(name, "library", stored, shape, width, key=key, value=value, eqn=eqn)
        stored, order = products.conv_operands(eqn, operands, to), products.conv_order(eqn)
        made = to.emit(name, "library", stored, [shape[d] for d in order], width, key=key, value=value, eqn=eqn)
        return products.ordered(made, [order.index(d) for d in range(len(order))], to)

    def is_by_library(self, eqn: Any, x: Instruction) -> bool:
        """Whether a library runs a reduction."""
        known = eqn.primitive.name in ("reduce_max", "reduce_min", "reduce_sum")
        return known and str(eqn.outvars[0].aval.dtype) == "float32" and x.num_elements >= library.MIN_ELEMENTS

    def windowed(self, eqn: Any, x: Instruction, to: Emitter) -> Instruction:
        """The first round of a reduction along a long dim."""
        axes = eqn.params["axes"]
        if all(x.shape[d] <= primitives.WINDOW for d in axes):
            return x
        shape = [-(-n // min(n, primitives.WINDOW)) if d in axes else n for d, n in enumerate(x.shape)]
        return to.emit(
            "reduce_window", "library", [x], shape, self.width(eqn.invars[0].aval), key=eqn.primitive.name, eqn=eqn
        )


def phase(eqn: Any, around: Phase) -> Phase:
    """What of a gradient an equation is part of, by the transformations that JAX names in its stack."""
    stack = compat.name_stack(eqn)
    if around == "backward" or "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else around


def _is_whole(op: Op, eqn: Any) -> bool:
    return len(op.operands) == len(eqn.invars) and len(op.results) == len(eqn.outvars)


def _in_place(name: str, operands: Sequence[Instruction | None]) -> tuple[tuple[int, int], ...]:
    if name == "dynamic_update_slice" or name.startswith("scatter"):
        return ((0, 0),) if operands[0] is not None else ()
    return ()
