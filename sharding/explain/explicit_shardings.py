"""What a program lacks to run with Explicit axes: the shardings that JAX does not derive from those of the operands.

With Explicit axes the sharding of a value is part of its type. Most ops derive that of their result from their
operands; where it is ambiguous (both operands of a product sharded along what is contracted, a gather), or where the
completion chose another one, the program must name it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import compat
from ..display.text_table import ruled
from ..graph import Graph, Scope
from ..propagation import Assignment
from ..spec import to_partition_spec

TAKES_OUT_SHARDING = {
    "broadcast_in_dim": "jnp.broadcast_to(..., out_sharding=)",
    "dot_general": "jnp.dot, jnp.einsum(..., out_sharding=)",
    "gather": "x.at[...].get(out_sharding=)",
    "ragged_dot_general": "jax.lax.ragged_dot(...)",
    "reshape": "jnp.reshape(..., out_sharding=)",
}
"""Primitive -> where its result's sharding is written."""

RESHARD = "jax.sharding.reshard(x, ...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitSharding:
    """A sharding that the program must name."""

    source: str
    """The user's line."""
    op: str
    spec: P
    write: str
    """Where to write it: `jnp.einsum(..., out_sharding=)`, or `jax.sharding.reshard`."""


class ExplicitShardings(tuple[ExplicitSharding, ...]):
    """The shardings to write, in program order; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "With Explicit axes JAX derives every sharding of this program."
        rows = [(one.source or "(unknown line)", one.op, str(one.spec), one.write) for one in self]
        return "\n".join(ruled([("line", "op", "spec", "write"), *rows]))

    __repr__ = __str__


def missing(assignment: Assignment) -> ExplicitShardings:
    """The shardings that a program must name to run with Explicit axes as it was completed.

    The backward pass names none: JAX derives the type of each cotangent from its primal value.
    """
    sizes = assignment.sizes
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
    graph: Graph = assignment.graph
    types = _Types(mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        found = [one for scope in graph.scopes() if not scope.manual for one in _of_scope(scope, assignment, types)]
    return ExplicitShardings(dict.fromkeys(found))


def _of_scope(scope: Scope, assignment: Assignment, types: _Types) -> Iterator[ExplicitSharding]:
    for eqn in compat.open_jaxpr(scope.jaxpr).eqns:
        has_body = any(True for _ in compat.sub_jaxprs(eqn.params))
        name = eqn.primitive.name
        if has_body or name == "annotate" or "transpose(" in compat.name_stack(eqn) or len(eqn.outvars) != 1:
            continue
        value = scope.env.get(eqn.outvars[0]) if not compat.is_drop(eqn.outvars[0]) else None
        if value is None:
            continue
        spec = _spec(assignment, value)
        values = [None if compat.is_literal(atom) else scope.env.get(atom) for atom in eqn.invars]
        if spec != types.derived(eqn, [P() if v is None else _spec(assignment, v) for v in values]):
            write = TAKES_OUT_SHARDING.get(name, RESHARD)
            yield ExplicitSharding(source=compat.source_line(eqn), op=name, spec=spec, write=write)


def _spec(assignment: Assignment, value: int) -> P:
    return to_partition_spec(assignment.boundary_spec(value))


class _Types:
    """The result types that JAX derives with Explicit axes, each once: its errors take milliseconds."""

    def __init__(self, mesh: AbstractMesh):
        self.mesh = mesh
        self.known: dict[Hashable, P | None] = {}

    def derived(self, eqn: Any, specs: Sequence[P]) -> P | None:
        """The spec that JAX derives for the result of an equation from those of its operands; None if none."""
        if eqn.primitive.name == "sharding_constraint":  # with Explicit axes it only asserts
            return specs[0]
        avals = tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars)
        key: Hashable = (eqn.primitive, tuple(eqn.params.items()), avals, tuple(specs))
        try:
            hash(key)
        except TypeError:
            key = id(eqn)
        if key not in self.known:
            self.known[key] = self._derived(eqn, specs)
        return self.known[key]

    def _derived(self, eqn: Any, specs: Sequence[P]) -> P | None:
        operands = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=NamedSharding(self.mesh, spec))
            for v, spec in zip(eqn.invars, specs, strict=True)
        ]
        params = eqn.primitive.get_bind_params(eqn.params)
        try:
            (result,) = jax.tree.leaves(jax.eval_shape(lambda *xs: eqn.primitive.bind(*xs, **params), *operands))
        except Exception:  # of several types: ambiguous, or operands that are sharded differently
            return None
        if result.sharding is None:  # of a callback
            return None
        entries = list(result.sharding.spec)
        while entries and entries[-1] is None:
            entries.pop()
        return P(*entries)
