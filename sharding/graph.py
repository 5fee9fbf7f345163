"""A program as the pass sees it: values and ops, flattened from a jaxpr.

Bodies of `jit`, `custom_jvp`, `custom_vjp` and remat appear inline, once per call. Bodies of `scan`, `while` and `cond`
appear once, with a trip count; what enters or leaves them is tied by *edges*: ops whose sources and target are all
split alike. A constant expression (`zeros`, `iota`, a broadcast scalar) is no value: every use gets one of its own,
since each device makes what it needs. The graph is a view: `Scope` says which variable of which jaxpr is which value,
so that `constrain` finds its way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from . import compat
from .rules import CONSTANT_PRESERVING, MOVES, Flow, Rule, identity, pointwise, rule_for
from .spec import Dim, Spec, from_partition_spec

CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint", "remat"}
)
"""Primitives whose body runs exactly once, in place."""

Atom = int | None
"""A value's index; None for a constant expression."""

Site = tuple[Any, ...]
"""The equation that something comes from, and the calls around it, innermost first; empty for the program's edges."""


def line(site: Site) -> str:
    """`file.py:line (function)` of the innermost equation whose line JAX kept."""
    return next((text for eqn in site if (text := compat.source_line(eqn))), "")


@dataclass(slots=True, eq=False)
class Op:
    """One op: an equation, or an edge of a loop, a branch or the program's own results."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None
    site: Site
    """Where it comes from."""
    times: int
    """How often it runs per call of the program (trip counts multiplied; an unknown one counts as 1)."""

    @property
    def source(self) -> str:
        """`file.py:line (function)` of the user's line; empty if unknown."""
        return line(self.site)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What an annotation says of a value."""

    spec: Spec
    origin: str
    """Who says so: `in_shardings`, `annotate at train.py:12 (step)`, ..."""


@dataclass(slots=True, eq=False)
class Scope:
    """One run of one jaxpr: its variables' values, and the runs of the jaxprs inside its equations."""

    jaxpr: Any
    env: dict[Any, Atom] = field(default_factory=dict)
    children: dict[tuple[int, str, int], Scope] = field(default_factory=dict)
    entries: dict[int, list[Atom]] = field(default_factory=dict)
    """Per equation with edges: for each operand the value that it enters, or None."""
    exits: list[Atom] = field(default_factory=list)
    """For each result of the jaxpr the value that it enters, or None."""


@dataclass(slots=True, eq=False)
class Graph:
    """Values and ops of one program; no device in sight."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[Any] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    """Per value where it is made; empty for arguments."""
    ops: list[Op] = field(default_factory=list)
    pins: dict[int, Pin] = field(default_factory=dict)
    clashes: list[tuple[int, Pin, Pin]] = field(default_factory=list)
    """Values that two annotations want differently: (value, the one kept, the other)."""
    names: dict[str, int] = field(default_factory=dict)
    """Name or path -> value."""
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    scope: Scope | None = None

    @property
    def unknown(self) -> dict[str, int]:
        """Primitives without a rule and how many ops have them."""
        counts: dict[str, int] = {}
        for op in self.ops:
            if op.rule is None and any(self.shapes[v] for v in (*op.operands, *op.results)):
                counts[op.name] = counts.get(op.name, 0) + 1
        return counts

    def source(self, value: int) -> str:
        """The user's line that makes a value; empty for arguments."""
        return line(self.sites[value])


def build(
    closed_jaxpr: Any,
    *,
    sizes: Mapping[str, int],
    in_names: Sequence[str],
    out_names: Sequence[str],
    in_pins: Sequence[Pin | None],
    out_pins: Sequence[Pin | None],
    ties: Mapping[int, int] | None = None,
) -> Graph:
    """The graph of a closed jaxpr.

    Args:
        closed_jaxpr: the traced program.
        sizes: mesh axis sizes.
        in_names: the path of each argument.
        out_names: the path of each result.
        in_pins: what is asked of each argument, if anything.
        out_pins: what is asked of each result, if anything.
        ties: result -> argument pairs that always share one spec (state that comes round again).
    """
    return _Builder(sizes).program(closed_jaxpr, in_names, out_names, in_pins, out_pins, ties or {})


class _Builder:
    def __init__(self, sizes: Mapping[str, int]):
        self.graph = Graph()
        self.sizes = sizes
        self.targets: set[int] = set()  # values of edges: an annotation never lands on them
        self.repeated: dict[str, list[int]] = {}
        self.calls: list[Any] = []  # the call equations around, innermost first

    def program(self, closed, in_names, out_names, in_pins, out_pins, ties) -> Graph:
        g, jaxpr = self.graph, compat.open_jaxpr(closed)
        for var, name, pin in zip(jaxpr.invars, in_names, in_pins, strict=True):
            v = self.value(var.aval, None)
            g.inputs.append(v)
            g.names[name] = v
            if pin is not None:
                g.pins[v] = pin
        g.scope = self.scope(jaxpr, g.inputs, 1)
        for i, (atom, name, pin) in enumerate(zip(jaxpr.outvars, out_names, out_pins, strict=True)):
            source = self.use(self.read(g.scope, atom), atom.aval)
            out = g.inputs[ties[i]] if i in ties else self.value(atom.aval, None)
            g.outputs.append(out)
            g.names[name] = out
            if pin is not None:
                self.pin(out, pin)
            self.edge([source], out, None, 1)
        g.scope.exits = list(g.outputs)
        self.name_repeated()
        return g

    def value(self, aval: Any, maker: Any) -> int:
        g = self.graph
        g.shapes.append(tuple(getattr(aval, "shape", ())))
        g.dtypes.append(getattr(aval, "dtype", None))
        g.sites.append((maker, *self.calls) if maker is not None else ())
        return len(g.shapes) - 1

    def use(self, atom: Atom, aval: Any) -> int:
        return self.value(aval, None) if atom is None else atom

    def edge(self, sources: Sequence[int], target: int, eqn: Any, times: int) -> None:
        rule = identity(len(sources), self.graph.shapes[target])
        self.op("edge", sources, [target], rule, eqn, times)

    def op(self, name: str, ins: Sequence[int], outs: Sequence[int], rule: Rule | None, eqn: Any, times: int) -> None:
        site = (eqn, *self.calls) if eqn is not None else ()
        self.graph.ops.append(Op(name, tuple(ins), tuple(outs), rule, site, times))

    def read(self, scope: Scope, atom: Any) -> Atom:
        return None if compat.is_literal(atom) else scope.env[atom]

    def scope(self, jaxpr: Any, inputs: Sequence[Atom], times: int) -> Scope:
        jaxpr = compat.open_jaxpr(jaxpr)
        scope = Scope(jaxpr)
        scope.env.update(dict.fromkeys(jaxpr.constvars))
        scope.env.update(zip(jaxpr.invars, inputs, strict=True))
        for i, eqn in enumerate(jaxpr.eqns):
            handler = getattr(self, "eqn_" + eqn.primitive.name, None)
            if eqn.primitive.name in CALLS:
                self.call(scope, i, eqn, times)
            elif handler is not None:
                handler(scope, i, eqn, times)
            else:
                self.plain(scope, eqn, times)
        return scope

    def outs(self, scope: Scope) -> list[Atom]:
        return [self.read(scope, atom) for atom in scope.jaxpr.outvars]

    def bind(self, scope: Scope, eqn: Any, values: Sequence[Atom]) -> None:
        scope.env.update((v, x) for v, x in zip(eqn.outvars, values, strict=True) if not compat.is_drop(v))

    def plain(self, scope: Scope, eqn: Any, times: int) -> None:
        name, atoms = eqn.primitive.name, [self.read(scope, a) for a in eqn.invars]
        scalars = all(a is None or not self.graph.shapes[a] for a in atoms)
        expands = name == "broadcast_in_dim" and scalars
        if expands or (name in CONSTANT_PRESERVING and all(a is None for a in atoms)):
            self.bind(scope, eqn, [None] * len(eqn.outvars))
            return
        ins = tuple(self.use(a, atom.aval) for a, atom in zip(atoms, eqn.invars, strict=True))
        outs = tuple(self.value(v.aval, eqn) for v in eqn.outvars)
        self.bind(scope, eqn, outs)
        shape = self.graph.shapes
        if name in MOVES:
            for a, b in zip(ins, outs, strict=True):
                self.op(name, [a], [b], identity(1, shape[b]), eqn, times)
            return
        rule = rule_for(name, [shape[v] for v in ins], [shape[v] for v in outs], eqn.params)
        self.op(name, ins, outs, rule, eqn, times)

    def call(self, scope: Scope, i: int, eqn: Any, times: int) -> None:
        key, pos, jaxpr = next(compat.sub_jaxprs(eqn.params))
        atoms = [self.read(scope, a) for a in eqn.invars]
        atoms = self.constrained(atoms, eqn, "in_shardings", times)
        self.calls.insert(0, eqn)
        child = self.scope(jaxpr, atoms, times)
        self.calls.pop(0)
        scope.children[i, key, pos] = child
        self.bind(scope, eqn, self.constrained(self.outs(child), eqn, "out_shardings", times))

    def constrained(self, atoms: list[Atom], eqn: Any, key: str, times: int) -> list[Atom]:
        """A nested jit's own shardings are annotations too."""
        for atom, sharding in zip(atoms, eqn.params.get(key, ()), strict=False):
            if atom is not None and isinstance(sharding, jax.sharding.NamedSharding):
                spec = self.checked(sharding.spec, atom)
                if spec is not None and atom not in self.targets:
                    self.pin(atom, Pin(spec=spec, origin=f"{key} of {eqn.params.get('name', 'jit')}"))
        return atoms

    def checked(self, pspec: Any, value: int) -> Spec | None:
        names = [n for e in pspec for n in (e if isinstance(e, tuple) else (e,)) if isinstance(n, str)]
        if any(n not in self.sizes for n in names) or len(pspec) > len(self.graph.shapes[value]):
            return None
        return from_partition_spec(pspec, self.graph.shapes[value], self.sizes, asked="sharding constraint")

    def eqn_annotate(self, scope: Scope, i: int, eqn: Any, times: int) -> None:
        p = eqn.params
        x = self.annotated(scope, eqn, p["asked"], f"annotate at {line((eqn, *self.calls))}", times)
        if p["name"] is not None:
            self.repeated.setdefault(p["name"], []).append(x)

    def eqn_sharding_constraint(self, scope: Scope, i: int, eqn: Any, times: int) -> None:
        sharding, free = eqn.params["sharding"], eqn.params["unconstrained_dims"]
        value = self.use(self.read(scope, eqn.invars[0]), eqn.invars[0].aval)
        spec = self.checked(sharding.spec, value) if isinstance(sharding, jax.sharding.NamedSharding) else None
        if spec is not None:
            dims = tuple(Dim(open=True) if d in free else dim for d, dim in enumerate(spec.dims))
            spec = Spec(dims=dims)
        self.annotated(scope, eqn, spec, f"with_sharding_constraint at {line((eqn, *self.calls))}", times)

    def annotated(self, scope: Scope, eqn: Any, spec: Spec | None, origin: str, times: int) -> int:
        """Lands an annotation on the operand itself where that is possible, else on a new value behind it."""
        x = self.use(self.read(scope, eqn.invars[0]), eqn.invars[0].aval)
        if spec is None or spec.is_open:
            self.bind(scope, eqn, [x])
            return x
        pin = Pin(spec=spec, origin=origin)
        if x in self.targets or not self.mergeable(x, spec):
            y = self.value(eqn.outvars[0].aval, eqn)
            shape = self.graph.shapes[y]
            rule = pointwise([shape], [shape], Flow.ELEMENTWISE)
            self.op("annotate", [x], [y], rule, eqn, times)
            x = y
        self.pin(x, pin)
        self.bind(scope, eqn, [x])
        return x

    def mergeable(self, value: int, spec: Spec) -> bool:
        have = self.graph.pins.get(value)
        return have is None or merged(have.spec, spec) is not None

    def pin(self, value: int, pin: Pin) -> None:
        have = self.graph.pins.get(value)
        if have is None:
            self.graph.pins[value] = pin
            return
        both = merged(have.spec, pin.spec)
        if both is None:
            self.graph.clashes.append((value, have, pin))
        else:
            origin = "; ".join(dict.fromkeys([*have.origin.split("; "), *([] if have.spec == both else [pin.origin])]))
            self.graph.pins[value] = Pin(spec=both, origin=origin)

    def name_repeated(self) -> None:
        for name, values in self.repeated.items():
            distinct = list(dict.fromkeys(values))
            for n, v in enumerate(distinct):
                alone = len(distinct) == 1 and name not in self.graph.names
                self.graph.names[name if alone else f"{name}#{n}"] = v

    def enter(self, atom: Any, scope: Scope, eqn: Any, times: int) -> int:
        """A loop's own copy of a value from outside, tied by an edge."""
        source = self.use(self.read(scope, atom), atom.aval)
        target = self.value(atom.aval, eqn)
        self.targets.add(target)
        self.edge([source], target, eqn, times)
        return target

    def carry(self, atoms: Sequence[Any], eqn: Any) -> list[int]:
        values = [self.value(a.aval, eqn) for a in atoms]
        self.targets.update(values)
        return values

    def eqn_scan(self, scope: Scope, i: int, eqn: Any, times: int) -> None:
        n_consts, n_carry = compat.scan_parts(eqn.params)
        length, body = eqn.params["length"], compat.open_jaxpr(eqn.params["jaxpr"])
        consts = [self.enter(a, scope, eqn, times) for a in eqn.invars[:n_consts]]
        inits = eqn.invars[n_consts : n_consts + n_carry]
        carry = self.carry(inits, eqn)
        xs = []
        for atom, var in zip(eqn.invars[n_consts + n_carry :], body.invars[n_consts + n_carry :], strict=True):
            whole = self.use(self.read(scope, atom), atom.aval)
            x = self.value(var.aval, eqn)
            rule = rule_for("dynamic_slice", [atom.aval.shape], [(1, *var.aval.shape)], {})
            self.op("scan xs", [whole], [x], _drop_lead(rule, operand=False), eqn, times * length)
            xs.append(x)
        child = self.scope(body, [*consts, *carry, *xs], times * length)
        scope.children[i, "jaxpr", 0] = child
        outs = [self.use(a, v.aval) for a, v in zip(self.outs(child), body.outvars, strict=True)]
        for init, out, target in zip(inits, outs, carry, strict=False):
            self.edge([self.use(self.read(scope, init), init.aval), out], target, eqn, times)
        ys = []
        for out, var in zip(outs[n_carry:], eqn.outvars[n_carry:], strict=True):
            y = self.value(var.aval, eqn)
            shapes = [var.aval.shape, (1, *self.graph.shapes[out])]
            rule = rule_for("dynamic_update_slice", shapes, [var.aval.shape], {})
            self.op("scan ys", [out], [y], _drop_lead(rule, operand=True), eqn, times * length)
            ys.append(y)
        scope.entries[i] = [*consts, *carry, *[None] * len(xs)]
        child.exits = [*carry, *[None] * len(ys)]
        self.bind(scope, eqn, [*carry, *ys])

    def eqn_while(self, scope: Scope, i: int, eqn: Any, times: int) -> None:
        p = eqn.params
        n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
        consts = [self.enter(a, scope, eqn, times) for a in eqn.invars[: n_cond + n_body]]
        inits = eqn.invars[n_cond + n_body :]
        carry = self.carry(inits, eqn)
        scope.children[i, "cond_jaxpr", 0] = self.scope(p["cond_jaxpr"], [*consts[:n_cond], *carry], times)
        child = self.scope(p["body_jaxpr"], [*consts[n_cond:], *carry], times)
        scope.children[i, "body_jaxpr", 0] = child
        for init, out, var, target in zip(inits, self.outs(child), child.jaxpr.outvars, carry, strict=True):
            sources = [self.use(self.read(scope, init), init.aval), self.use(out, var.aval)]
            self.edge(sources, target, eqn, times)
        scope.entries[i] = [*consts, *carry]
        child.exits = list(carry)
        self.bind(scope, eqn, carry)

    def eqn_cond(self, scope: Scope, i: int, eqn: Any, times: int) -> None:
        inputs = [self.read(scope, a) for a in eqn.invars[1:]]
        results = self.carry(eqn.outvars, eqn)
        sources: list[list[int]] = [[] for _ in results]
        for b, branch in enumerate(eqn.params["branches"]):
            child = self.scope(branch, inputs, times)
            scope.children[i, "branches", b] = child
            child.exits = list(results)
            for s, out, var in zip(sources, self.outs(child), child.jaxpr.outvars, strict=True):
                s.append(self.use(out, var.aval))
        for s, target in zip(sources, results, strict=True):
            self.edge(s, target, eqn, times)
        self.bind(scope, eqn, results)


def merged(a: Spec, b: Spec) -> Spec | None:
    """Both annotations in one where each dim is said by one of them only, or by both alike; else None."""
    dims = []
    for x, y in zip(a.dims, b.dims, strict=True):
        if x == y or (y.open and not y.axes):
            dims.append(x)
        elif x.open and not x.axes:
            dims.append(y)
        else:
            return None
    used = [axis for d in dims for axis in d.axes]
    return Spec(dims=tuple(dims)) if len(set(used)) == len(used) else None


def _drop_lead(rule: Rule | None, *, operand: bool) -> Rule:
    """The rule of a loop's slice: a dynamic slice or update of one step, without the leading dim of size 1."""
    assert rule is not None
    if operand:  # (stack, update) -> stack becomes update -> stack
        operands, results = (rule.operands[1][1:],), rule.results
    else:
        operands, results = rule.operands, (rule.results[0][1:],)
    return Rule(
        operands=operands, results=results, sizes=rule.sizes, kinds=rule.kinds, blocked=rule.blocked, flow=rule.flow
    )
