"""What a program lacks to run with Explicit axes: the shardings that JAX does not derive from those of the operands.

With Explicit axes the sharding of a value is part of its type. Most ops derive that of their result from their
operands; where it is ambiguous (both operands of a product sharded along what is contracted, a gather), or where the
completion chose another one, the program must name it. So it must where types have to agree: what a loop carries, its
stacked arrays, and the results of branches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import compat
from ..display import Column, Table, Tabular
from ..display.text_table import ruled
from ..graph import Atom, Graph, Scope
from ..propagation import Assignment
from ..rewrite.op_strategy import OpStrategies
from ..spec import to_partition_spec, trimmed

TAKES_OUT_SHARDING = {
    "broadcast_in_dim": "jnp.broadcast_to(..., out_sharding=)",
    "conv_general_dilated": "jax.lax.conv_general_dilated(..., out_sharding=)",
    "dot_general": "jnp.dot, jnp.einsum(..., out_sharding=)",
    "gather": "x.at[...].get(out_sharding=)",
    "ragged_dot_general": "jax.lax.ragged_dot(...)",
    "reshape": "jnp.reshape(..., out_sharding=)",
    "scatter": "x.at[...].set(..., out_sharding=)",
    "scatter-add": "x.at[...].add(..., out_sharding=)",
}
"""Primitive -> where its result's sharding is written."""

OUT_SHARDING = {"broadcast_in_dim": "sharding", "iota": "sharding", "reshape": "sharding"} | dict.fromkeys(
    ("conv_general_dilated", "dot_general", "ragged_dot_general"), "out_sharding"
)
"""Primitive -> the parameter for its result's sharding."""

RESHARD = "jax.sharding.reshard(x, ...)"
PLACES = {
    "result": RESHARD,
    "operand": f"{RESHARD} of an operand",
    "entry": f"{RESHARD} before the loop",
    "slice": f"{RESHARD} of the slice",
    "exit": f"{RESHARD} where the body returns it",
}
"""Which array a line reshards, where no `out_sharding=` says it -> how it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitSharding:
    """A sharding that the program must name."""

    source: str
    """The user's line."""
    op: str
    spec: P
    write: str
    """Where to write it: `jnp.einsum(..., out_sharding=)`, or `jax.sharding.reshard`."""


NOTHING_TO_WRITE = "With Explicit axes JAX derives every sharding of this program."
COLUMNS = (Column("line", "code"), Column("op"), Column("spec", "code"), Column("write", "code"))


class ExplicitShardings(tuple[ExplicitSharding, ...], Tabular):
    """The shardings to write, in program order; prints as a table."""

    __slots__ = ()

    def tables(self) -> list[Table]:
        """One table."""
        rows = [(one.source or "(unknown line)", one.op, str(one.spec), one.write) for one in self]
        return [Table("" if rows else NOTHING_TO_WRITE, COLUMNS, rows)]

    def __str__(self) -> str:
        (table,) = self.tables()
        return "\n".join(ruled([tuple(column.name for column in COLUMNS), *table.rows])) if self else table.title

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Named:
    """An array of an equation, or a result of a body, whose sharding the program must name."""

    eqn: Any
    """The equation; for a body's result the one around the body."""
    place: str
    """One of `PLACES`."""
    index: int
    """Of the operand, the result, or the argument or result of the body."""
    spec: P


def missing(assignment: Assignment) -> ExplicitShardings:
    """The shardings that a program must name to run with Explicit axes as it was completed.

    The backward pass names none: JAX derives the type of each cotangent from its primal value.
    """
    found = []
    for _, one in named(assignment):
        name = one.eqn.primitive.name
        write = PLACES[one.place] if one.place != "result" else TAKES_OUT_SHARDING.get(name, RESHARD)
        found.append(ExplicitSharding(source=compat.source_line(one.eqn), op=name, spec=one.spec, write=write))
    return ExplicitShardings(dict.fromkeys(found))


def named(assignment: Assignment) -> Iterator[tuple[Scope, Named]]:
    """The arrays whose shardings a program must name, each with the jaxpr that it is in."""
    graph: Graph = assignment.graph
    search = _Search(assignment)
    for scope in graph.scopes():
        if not scope.manual:
            for one in search.of_scope(scope):
                yield scope, one


class _Search:
    def __init__(self, assignment: Assignment):
        sizes = assignment.sizes
        self.assignment, self.strategies = assignment, OpStrategies(assignment)
        self.types = _Types(
            AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
        )

    def of_scope(self, scope: Scope) -> Iterator[Named]:
        bodies: dict[int, list[Scope]] = {}
        for (i, _, _), child in scope.children.items():
            bodies.setdefault(i, []).append(child)
        for i, eqn in enumerate(scope.jaxpr.eqns):
            if "transpose(" in compat.name_stack(eqn):
                continue
            if i in bodies:
                yield from self.of_loop_or_branch(scope, i, eqn, bodies[i])
            elif not any(True for _ in compat.sub_jaxprs(eqn.params)):
                yield from self.of_op(scope, eqn)

    def of_op(self, scope: Scope, eqn: Any) -> Iterator[Named]:
        values = [None if compat.is_drop(v) else scope.env.get(v) for v in eqn.outvars]
        made = [v for v in values if v is not None]
        if not made:
            return
        have = [self.spec(_read(scope, atom)) for atom in eqn.invars]
        derived = self.types.derived(eqn, have)
        if derived is None and eqn.primitive.name not in TAKES_OUT_SHARDING:
            for needs in self.operands_to_try(eqn, made[0], have):
                derived = self.types.derived(eqn, needs)
                if derived is not None:
                    pairs = enumerate(zip(needs, have, strict=True))
                    yield from (Named(eqn, "operand", k, need) for k, (need, spec) in pairs if need != spec)
                    break
        for k, v in enumerate(values):
            if v is not None and (derived is None or derived[k] != self.spec(v)):
                yield Named(eqn, "result", k, self.spec(v))

    def operands_to_try(self, eqn: Any, made: int, have: Sequence[P]) -> Iterator[Sequence[P]]:
        """Other specs of the operands of an op that refuses theirs: those it runs with, fewer sharded dims, none."""
        op = self.assignment.graph.makers.get(made)
        if op is not None and op.rule is not None and len(op.operands) == len(have):
            have = [to_partition_spec(spec) for spec in self.strategies.of(op).operand_specs]
            yield have
        for d in range(max(map(len, have))):
            yield [trimmed((*spec[:d], None, *spec[d + 1 :])) for spec in have]
        yield [P()] * len(have)

    def of_loop_or_branch(self, scope: Scope, i: int, eqn: Any, bodies: Sequence[Scope]) -> Iterator[Named]:
        """Where the types on the two sides of an edge differ."""
        stacks = [s for body in bodies for s in body.stacked_inputs]
        targets = [*scope.entries.get(i, ())]
        for k, atom in enumerate(eqn.invars):
            stack = stacks[k] if stacks else None
            target = stack if stack is not None else targets[k] if targets else None
            if target is not None:
                want = self.spec(target)
                if stack is not None:  # along which JAX shards nothing
                    want = trimmed((None, *want[1:]))
                if want != self.spec(_read(scope, atom)):
                    yield Named(eqn, "entry", k, want)
        for body in bodies:
            for k, stack in enumerate(body.stacked_inputs):
                row = body.env[body.jaxpr.invars[k]]
                if stack is not None and row is not None and self.spec(row) != trimmed(self.spec(stack)[1:]):
                    yield Named(eqn, "slice", k, self.spec(row))
            for k, (atom, target) in enumerate(zip(body.jaxpr.outvars, body.exits, strict=False)):
                stack = body.stacked_outputs[k] if body.stacked_outputs else None
                if target is None and stack is None:
                    continue
                want = self.spec(target) if stack is None else trimmed(self.spec(stack)[1:])
                if want != self.spec(_read(body, atom)):
                    yield Named(eqn, "exit", k, want)
        yield from self.of_stacked_results(scope, eqn, bodies)

    def of_stacked_results(self, scope: Scope, eqn: Any, bodies: Sequence[Scope]) -> Iterator[Named]:
        for body in bodies:
            for k, (stack, var) in enumerate(zip(body.stacked_outputs, eqn.outvars, strict=False)):
                result = None if compat.is_drop(var) else scope.env[var]
                if stack is not None and result is not None:
                    made = trimmed((None, *self.spec(stack)[1:]))
                    if self.spec(result) != made:
                        yield Named(eqn, "result", k, self.spec(result))

    def spec(self, value: Atom) -> P:
        return P() if value is None else to_partition_spec(self.assignment.boundary_spec(value))


def bound(eqn: Any, operands: Sequence[Any], out_sharding: NamedSharding | None = None) -> Any:
    """The results of an equation that was traced with Auto axes, with Explicit ones."""
    key = OUT_SHARDING.get(eqn.primitive.name)
    params = eqn.params if key is None else eqn.params | {key: out_sharding}
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))


def _read(scope: Scope, atom: Any) -> Atom:
    return None if compat.is_literal(atom) else scope.env.get(atom)


class _Types:
    """The result types that JAX derives with Explicit axes, each once: its errors take milliseconds."""

    def __init__(self, mesh: AbstractMesh):
        self.mesh = mesh
        self.known: dict[Hashable, tuple[P | None, ...] | None] = {}

    def derived(self, eqn: Any, specs: Sequence[P]) -> tuple[P | None, ...] | None:
        """The specs that JAX derives for the results of an equation from those of its operands; None if none."""
        if eqn.primitive.name in ("annotate", "sharding_constraint"):  # with Explicit axes they reshard nothing
            return (specs[0],)
        avals = tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars)
        key: Hashable = (eqn.primitive, tuple(eqn.params.items()), avals, tuple(specs))
        try:
            hash(key)
        except TypeError:
            key = (id(eqn), *specs)
        if key not in self.known:
            with jax.sharding.use_abstract_mesh(self.mesh):
                self.known[key] = self._derived(eqn, specs)
        return self.known[key]

    def _derived(self, eqn: Any, specs: Sequence[P]) -> tuple[P | None, ...] | None:
        operands = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=NamedSharding(self.mesh, spec))
            for v, spec in zip(eqn.invars, specs, strict=True)
        ]
        try:
            found = jax.eval_shape(lambda *xs: bound(eqn, xs), *operands)
        except Exception:  # of several types: ambiguous, or operands that are sharded differently
            return None
        shardings = [x.sharding for x in jax.tree.leaves(found)]  # None of a callback
        return tuple(None if one is None else trimmed(one.spec) for one in shardings)
