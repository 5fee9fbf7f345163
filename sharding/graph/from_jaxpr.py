"""`Builder`: adds the equations of a jaxpr to a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from .. import compat
from ..rules import (
    CONSTANT_PRESERVING,
    MOVES,
    PARTITIONED_BY_ITSELF,
    Flow,
    Rule,
    Shape,
    barrier,
    identity,
    opaque,
    pointwise,
    rule_for,
)
from ..spec import Dim, Spec, from_partition_spec
from .annotation import Annotation, joined, merged
from .graph import Atom, Graph, Group, Loop, Op, Scope, Site, line
from .inlined_calls import CALLS

DEVICE = (None, "device")
"""The kinds of memory that are the device's."""
HOST = "pinned_host"
"""The kind of the host's memory where the program names none."""

Handler = Callable[["Builder", Scope, int, Any, int], None]
"""(builder, scope, index of the equation, equation, number of runs) -> None."""


class Builder:
    """Builds a graph equation by equation; `handlers` add loops, branches and other special equations."""

    def __init__(self, sizes: Mapping[str, int], handlers: Mapping[str, Handler]):
        self.graph, self.handlers = Graph(), handlers
        self.sizes = sizes
        self.targets: set[int] = set()  # edge targets, which are never annotated directly
        self.repeated: dict[str, list[int]] = {}
        self.loops: tuple[Loop, ...] = ()  # enclosing loops of unknown length
        self.around: Site = ()  # enclosing equations, innermost first
        self.manual: frozenset[str] = frozenset()  # manual axes of enclosing shard_maps
        self.divergent = False  # whether an enclosing loop or branch may run on only some devices along them
        self.rules: dict[Any, Rule | None] = {}  # cache by primitive, shapes and parameters
        self.distinct: dict[Rule, Rule] = {}

    def value(self, aval: Any, maker: Any) -> int:
        g = self.graph
        g.shapes.append(tuple(getattr(aval, "shape", ())))
        g.dtypes.append(getattr(aval, "dtype", None))
        g.sites.append((maker, *self.around) if maker is not None else ())
        made = len(g.shapes) - 1
        if compat.is_on_host(aval):
            g.memory_kinds[made] = HOST
        if self.divergent:
            g.divergent.add(made)
        return made

    def use(self, atom: Atom, aval: Any) -> int:
        return self.value(aval, None) if atom is None else atom

    def edge(self, sources: Sequence[int], target: int, eqn: Any, times: int) -> None:
        rule = self.shared(identity(len(sources), self.graph.shapes[target]))
        self.op("edge", sources, [target], rule, eqn, times)

    def op(self, name: str, ins: Sequence[int], outs: Sequence[int], rule: Rule | None, eqn: Any, times: int) -> None:
        site = (eqn, *self.around) if eqn is not None else ()
        self.graph.ops.append(Op(name, tuple(ins), tuple(outs), rule, site, times, self.loops))

    def depend(self, values: Sequence[Atom], on: Iterable[Atom]) -> None:
        """States that values depend on others, which are no operands of theirs."""
        on = {v for v in on if v is not None}
        for v in values if on else ():
            assert v is not None
            self.graph.dependencies.setdefault(v, set()).update(on)

    def decide(self, eqn: Any, values: Sequence[Atom], conditions: Sequence[Atom]) -> None:
        """States that the results of a loop or branch, and its effects, depend on conditions."""
        self.depend(values, conditions)
        if compat.has_side_effects(eqn):
            self.graph.decisive.update(v for v in conditions if v is not None)

    def read(self, scope: Scope, atom: Any) -> Atom:
        return None if compat.is_literal(atom) else scope.env[atom]

    def scope(self, jaxpr: Any, inputs: Sequence[Atom], times: int, scalars: Sequence[Collection[int]] = ()) -> Scope:
        """Adds the equations of a jaxpr.

        Args:
            jaxpr: the jaxpr.
            inputs: the values of its arguments.
            times: how often it runs.
            scalars: for each argument that is a constant expression, the scalars that are broadcast in it.
        """
        jaxpr = compat.open_jaxpr(jaxpr)
        scope = Scope(jaxpr, manual=self.manual, divergent=self.divergent)
        scope.env.update(dict.fromkeys(jaxpr.constvars))
        scope.env.update(zip(jaxpr.invars, inputs, strict=True))
        scope.scalars.update((v, {*found}) for v, found in zip(jaxpr.invars, scalars, strict=False) if found)
        for i, eqn in enumerate(jaxpr.eqns):
            name = eqn.primitive.name
            if name in CALLS:
                self.call(scope, i, eqn, times)
            elif name in self.handlers:
                around, self.divergent = self.divergent, self.divergent or self.may_diverge(name)
                self.handlers[name](self, scope, i, eqn, times)
                self.divergent = around
            elif name == "annotate":
                self.annotate(scope, eqn, times)
            elif name == "same":
                self.same(scope, eqn)
            elif name == "barrier":
                self.barrier(scope, eqn, times)
            elif name == "sharding_constraint":
                self.sharding_constraint(scope, eqn, times)
            else:
                self.plain(scope, i, eqn, times)
            self.depend_on_scalars(scope, i, eqn)
        return scope

    def depend_on_scalars(self, scope: Scope, i: int, eqn: Any) -> None:
        """States on which scalars the results of an equation depend through constant expressions.

        Loops and branches state that themselves, and so does the body of a call.
        """
        name = eqn.primitive.name
        if name in self.handlers:
            return
        if name in CALLS:
            (child,) = (scope.children[key] for key in scope.children if key[0] == i)
            for var, inner in zip(eqn.outvars, child.jaxpr.outvars, strict=True):
                if not compat.is_drop(var) and scope.env[var] is None and (found := child.scalars_of([inner])):
                    scope.scalars[var] = found
            return
        found = scope.scalars_of(eqn.invars)
        for var in eqn.outvars if found else ():
            if compat.is_drop(var):
                continue
            if scope.env[var] is None:
                scope.scalars.setdefault(var, set()).update(found)
            else:
                self.depend([scope.env[var]], found)

    def may_diverge(self, name: str) -> bool:
        """Whether control flow in an equation's bodies may differ between devices.

        In a `shard_map` each device along the manual axes has its own values, including the condition of a loop or
        branch. Conditions that are equal on all of them are not detected.
        """
        return name in ("while", "cond") and any(self.sizes[axis] > 1 for axis in self.manual)

    def outs(self, scope: Scope) -> list[Atom]:
        return [self.read(scope, atom) for atom in scope.jaxpr.outvars]

    def bind(self, scope: Scope, eqn: Any, values: Sequence[Atom]) -> None:
        for var, value in zip(eqn.outvars, values, strict=True):
            if not compat.is_drop(var):
                scope.env[var] = value

    def plain(self, scope: Scope, i: int, eqn: Any, times: int) -> None:
        name, g, env = eqn.primitive.name, self.graph, scope.env
        atoms = [None if compat.is_literal(a) else env[a] for a in eqn.invars]
        if self.is_constant(name, atoms) and (name == "broadcast_in_dim" or not scope.scalars_of(eqn.invars)):
            self.bind(scope, eqn, [None] * len(eqn.outvars))
            if name == "broadcast_in_dim" and atoms[0] is not None:
                scope.scalars[eqn.outvars[0]] = {atoms[0]}
            return
        ins = tuple([self.use(a, atom.aval) for a, atom in zip(atoms, eqn.invars, strict=True)])
        outs = tuple([self.value(v.aval, eqn) for v in eqn.outvars])
        self.bind(scope, eqn, outs)
        if name in MOVES:
            for a, b in zip(ins, outs, strict=True):
                self.op(name, [a], [b], self.shared(identity(1, g.shapes[b])), eqn, times)
            for b, target in zip(outs, eqn.params.get("devices", ()) if name == "device_put" else (), strict=False):
                self.placed(b, target, eqn)
            return
        rule = self.rule(eqn, [g.shapes[v] for v in ins], [g.shapes[v] for v in outs])
        self.op(name, ins, outs, rule, eqn, times)
        if rule is not None and rule.is_opaque and ins:
            scope.opaque[i] = g.ops[-1]

    def placed(self, value: int, target: Any, eqn: Any) -> None:
        """Adds what the target of a `device_put` says: a kind of memory, and an annotation by its spec."""
        if not isinstance(target, jax.sharding.NamedSharding):
            return
        if target.memory_kind not in DEVICE:
            self.graph.memory_kinds[value] = target.memory_kind
        spec = self.checked(target.spec, value) if dict(target.mesh.shape) == dict(self.sizes) else None
        if spec is not None and not spec.is_open:
            self.add_annotation(value, Annotation(spec=spec, origin=f"device_put at {line((eqn, *self.around))}"))

    def is_constant(self, primitive: str, atoms: Sequence[Atom]) -> bool:
        """Whether an equation is a constant expression: of constants, or a broadcast scalar.

        What is computed from a broadcast scalar that is not constant is a value.
        """
        if primitive == "broadcast_in_dim":
            return all(a is None or not self.graph.shapes[a] for a in atoms)
        return primitive in CONSTANT_PRESERVING and atoms.count(None) == len(atoms)

    def rule(self, eqn: Any, ins: Sequence[Shape], outs: Sequence[Shape]) -> Rule | None:
        """Returns the rule of an equation; equal rules are one object, and a deep model has few."""
        name = eqn.primitive.name
        key = (name, *ins, None, *outs, *eqn.params.values())
        try:
            return self.rules[key]
        except KeyError:
            found = self.rules[key] = self.shared(_rule_or_opaque(name, ins, outs, eqn.params))
            return found
        except TypeError:  # unhashable parameters
            return self.shared(_rule_or_opaque(name, ins, outs, eqn.params))

    def shared(self, rule: Rule | None) -> Rule | None:
        return None if rule is None else self.distinct.setdefault(rule, rule)

    def call(self, scope: Scope, i: int, eqn: Any, times: int) -> None:
        key, pos, jaxpr = next(compat.sub_jaxprs(eqn.params))
        atoms = [self.read(scope, a) for a in eqn.invars]
        atoms = self.constrained(atoms, eqn, "in_shardings", times)
        scalars = [scope.scalars_of([a]) for a in eqn.invars]
        child = scope.children[i, key, pos] = self.body(eqn, jaxpr, atoms, times, scalars)
        self.bind(scope, eqn, self.constrained(self.outs(child), eqn, "out_shardings", times))

    def body(
        self, eqn: Any, jaxpr: Any, inputs: Sequence[Atom], times: int, scalars: Sequence[Collection[int]] = ()
    ) -> Scope:
        """Adds the body of an equation, see `scope`."""
        around, self.around = self.around, (eqn, *self.around)
        child = self.scope(jaxpr, inputs, times, scalars)
        self.around = around
        return child

    def constrained(self, atoms: list[Atom], eqn: Any, key: str, times: int) -> list[Atom]:
        """Adds the shardings of a nested jit as annotations."""
        for atom, sharding in zip(atoms, eqn.params.get(key, ()), strict=False):
            if atom is not None and isinstance(sharding, jax.sharding.NamedSharding):
                spec = self.checked(sharding.spec, atom)
                if spec is not None and atom not in self.targets:
                    self.add_annotation(atom, Annotation(spec=spec, origin=f"{key} of {eqn.params.get('name', 'jit')}"))
        return atoms

    def checked(self, pspec: Any, value: int) -> Spec | None:
        names = [n for e in pspec for n in (e if isinstance(e, tuple) else (e,)) if isinstance(n, str)]
        if any(n not in self.sizes for n in names) or len(pspec) > len(self.graph.shapes[value]):
            return None
        return from_partition_spec(pspec, self.graph.shapes[value], self.sizes, asked="sharding constraint")

    def annotate(self, scope: Scope, eqn: Any, times: int) -> None:
        p = eqn.params
        x = self.annotated(scope, eqn, p["asked"], f"annotate at {line((eqn, *self.around))}", times)
        if p["name"] is not None:
            self.repeated.setdefault(p["name"], []).append(x)

    def same(self, scope: Scope, eqn: Any) -> None:
        """Adds a group; its members stay separate values, which propagation shards as one."""
        members = [self.use(self.read(scope, a), a.aval) for a in eqn.invars]
        self.graph.groups.append(Group(tuple(members), (eqn, *self.around)))
        self.bind(scope, eqn, members)

    def barrier(self, scope: Scope, eqn: Any, times: int) -> None:
        (operand,) = eqn.invars
        x, y = self.use(self.read(scope, operand), operand.aval), self.value(eqn.outvars[0].aval, eqn)
        rule = self.shared(barrier(self.graph.shapes[y], eqn.params["allowed"]))
        self.op("barrier", [x], [y], rule, eqn, times)
        self.bind(scope, eqn, [y])

    def sharding_constraint(self, scope: Scope, eqn: Any, times: int) -> None:
        sharding, free = eqn.params["sharding"], eqn.params["unconstrained_dims"]
        value = self.use(self.read(scope, eqn.invars[0]), eqn.invars[0].aval)
        spec = self.checked(sharding.spec, value) if isinstance(sharding, jax.sharding.NamedSharding) else None
        if spec is not None:
            dims = tuple(Dim(open=True) if d in free else dim for d, dim in enumerate(spec.dims))
            spec = Spec(dims=dims)
        self.annotated(scope, eqn, spec, f"with_sharding_constraint at {line((eqn, *self.around))}", times)

    def annotated(self, scope: Scope, eqn: Any, spec: Spec | None, origin: str, times: int) -> int:
        """Annotates the operand itself if possible, otherwise a new value after it."""
        x = self.use(self.read(scope, eqn.invars[0]), eqn.invars[0].aval)
        if spec is None or spec.is_open:
            self.bind(scope, eqn, [x])
            return x
        annotation = Annotation(spec=spec, origin=origin)
        if x in self.targets or not self.mergeable(x, spec):
            y = self.value(eqn.outvars[0].aval, eqn)
            shape = self.graph.shapes[y]
            rule = pointwise([shape], [shape], Flow.ELEMENTWISE)
            self.op("annotate", [x], [y], rule, eqn, times)
            x = y
        self.add_annotation(x, annotation)
        self.bind(scope, eqn, [x])
        return x

    def mergeable(self, value: int, spec: Spec) -> bool:
        have = self.graph.annotations.get(value)
        return have is None or merged(have.spec, spec) is not None

    def add_annotation(self, value: int, annotation: Annotation) -> None:
        have = self.graph.annotations.get(value)
        if have is None:
            self.graph.annotations[value] = annotation
            return
        both = joined(have, annotation)
        if both is None:
            self.graph.annotation_conflicts.append((value, have, annotation))
        else:
            self.graph.annotations[value] = both

    def name_repeated(self) -> None:
        for name, values in self.repeated.items():
            distinct = list(dict.fromkeys(values))
            for n, v in enumerate(distinct):
                alone = len(distinct) == 1 and name not in self.graph.names
                self.graph.names[name if alone else f"{name}#{n}"] = v


def _rule_or_opaque(name: str, ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """The rule of a primitive, or that of an op of which nothing is known; None if XLA knows how to partition it."""
    rule = rule_for(name, ins, outs, params)
    return rule if rule is not None or name in PARTITIONED_BY_ITSELF else opaque(ins, outs)
