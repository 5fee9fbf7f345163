"""Marks on every value of a program, by which the shardings that Shardy infers are read back.

A mark is an unconstrained sharding constraint in a named scope of its own. Calls are inlined, bodies of loops and
branches stay in place. Closed arguments and annotated values get no unconstrained mark, since its open dims could get
axes where theirs are closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import compat
from ..annotations.annotate import annotate_p
from ..annotations.propagation_barrier import barrier_p
from ..annotations.same import same_p
from ..graph import CALLS, Graph, Scope, value_annotations
from ..spec import Spec, indivisible, to_partition_spec

_NAME = re.compile(r"sharding_mark_(\d+)_")


@dataclass(frozen=True, slots=True)
class Mark:
    """A marked value."""

    value: int
    """Index in the graph."""
    spec: Spec | None
    """Its annotation there, with priorities, which JAX cannot express."""
    output: bool = False
    """Whether the mark is on a result of the program."""


def mark_number(location: Any) -> int | None:
    """Returns the number of the mark at an operation's location, or None."""
    found = _NAME.search(str(location))
    return None if found is None else int(found[1])


class MarkedProgram:
    """A closed jaxpr with marks; tracing `run` fills `marks`.

    Args:
        graph: the graph of the jaxpr.
        program: the closed jaxpr.
        mesh: the mesh of the specs.
    """

    def __init__(self, graph: Graph, program: Any, mesh: AbstractMesh):
        self.graph, self.mesh, self.annotations = graph, mesh, value_annotations(graph)
        self.tied = {v for group in graph.groups for v in group.members if v in self.annotations}
        self.jaxpr, self.consts = compat.open_jaxpr(program), program.consts
        self.tracers = [c for c in self.consts if isinstance(c, compat.Tracer)]
        self.marks: list[Mark] = []

    @property
    def avals(self) -> list[Any]:
        """Abstract arguments of `run`."""
        others = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.tracers]
        return [*(v.aval for v in self.jaxpr.invars), *others]

    @property
    def in_shardings(self) -> tuple[NamedSharding | None, ...]:
        """Shardings of the arguments of `run`; None for those with a mark."""
        specs = [self.argument_spec(v) for v in self.graph.inputs]
        shardings = [None if s is None else NamedSharding(self.mesh, to_partition_spec(s)) for s in specs]
        return (*shardings, *[None] * len(self.tracers))

    def argument_spec(self, value: int) -> Spec | None:
        """Returns the annotated spec of an argument if `in_shardings` can express it."""
        spec = self.annotated_spec(value)
        if spec is None or any(d.open or d.priority for d in spec.dims):
            return None
        return None if indivisible(spec, self.graph.shapes[value], self.mesh.shape) else spec

    def annotated_spec(self, value: int) -> Spec | None:
        annotation = self.annotations.get(value)
        return None if annotation is None else annotation.spec

    def run(self, *args: Any) -> list[Any]:
        """Runs the program with marks; `args` are its arguments, then the tracers that it closes over."""
        assert self.graph.scope is not None
        inputs, closed_over = args[: len(self.graph.inputs)], iter(args[len(self.graph.inputs) :])
        consts = [next(closed_over) if isinstance(c, compat.Tracer) else c for c in self.consts]
        self.marks.clear()
        pairs = zip(inputs, self.graph.inputs, strict=True)
        inputs = [x if self.argument_spec(v) else self.mark(x, v, self.annotated_spec(v)) for x, v in pairs]
        outs = self.body(self.graph.scope, consts, inputs)
        pairs = zip(outs, self.graph.outputs, strict=True)
        return [self.mark(x, v, self.annotated_spec(v), output=True) for x, v in pairs]

    def mark(self, x: Any, value: int | None, spec: Spec | None = None, *, output: bool = False) -> Any:
        if value in self.tied:  # Shardy applies a member's annotation to the whole group, but not to marks
            spec = self.annotations[value].spec
        if value is None or not getattr(x, "ndim", 0) or compat.is_extended(x.dtype):
            return x
        pspec = P(*[P.UNCONSTRAINED] * x.ndim) if spec is None else to_partition_spec(spec, keep_open=True)
        context = jax.sharding.get_abstract_mesh()  # in the body of a shard_map some of its axes are manual
        with jax.named_scope(f"sharding_mark_{len(self.marks)}_"):
            self.marks.append(Mark(value, spec, output))
            sharding = NamedSharding(context if context.manual_axes else self.mesh, pspec)
            return jax.lax.with_sharding_constraint(x, sharding)

    def body(self, scope: Scope, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Runs a jaxpr with marks."""
        jaxpr = scope.jaxpr
        env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else env[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            outs = self.equation(scope, i, eqn, [read(a) for a in eqn.invars])
            env.update((v, x) for v, x in zip(eqn.outvars, outs, strict=True) if not compat.is_drop(v))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, scope: Scope, i: int, eqn: Any, ins: list[Any]) -> list[Any]:
        """Returns the marked results of an equation."""
        name = eqn.primitive.name
        if eqn.primitive is annotate_p:
            spec = eqn.params["asked"]
            unmarked = spec is None or spec.is_open or compat.is_drop(eqn.outvars[0])
            return ins if unmarked else [self.mark(ins[0], scope.env[eqn.outvars[0]], spec)]
        if eqn.primitive is same_p:  # no new values
            return same_p.bind(*ins, decided=False)
        if eqn.primitive is barrier_p:
            ins = [barrier_p.bind(*ins, allowed=eqn.params["allowed"], decided=False)]
            return [self.mark(ins[0], None if compat.is_drop(eqn.outvars[0]) else scope.env[eqn.outvars[0]])]
        if name in CALLS:
            key, pos, jaxpr = next(compat.sub_jaxprs(eqn.params))
            return self.body(scope.children[i, key, pos], getattr(jaxpr, "consts", ()), ins)
        if name == "shard_map":
            outs = self.shard_map(scope, i, eqn, ins)
        elif name == "square":  # lowered to a product before Shardy runs
            outs = [jax.lax.integer_pow(ins[0], 2)]
        else:
            params = eqn.primitive.get_bind_params(self.parameters(scope, i, eqn))
            bound = eqn.primitive.bind(*ins, **params)
            outs = bound if eqn.primitive.multiple_results else [bound]
        values = [None if compat.is_drop(v) else scope.env[v] for v in eqn.outvars]
        # JAX lowers a `device_put` into another memory without the spec of its sharding.
        specs = [self.annotated_spec(v) if name == "device_put" and v is not None else None for v in values]
        return [self.mark(x, v, spec) for x, v, spec in zip(outs, values, specs, strict=True)]

    def shard_map(self, scope: Scope, i: int, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        """Runs a `shard_map` with marks in its body, which can only be traced inside a `shard_map`."""
        child, p = scope.children.get((i, "jaxpr", 0)), eqn.params
        if child is None:
            return eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(p))

        def run(*args: Any) -> tuple[Any, ...]:
            marked = [self.mark(x, child.env[v]) for x, v in zip(args, child.jaxpr.invars, strict=True)]
            return tuple(self.body(child, getattr(p["jaxpr"], "consts", ()), marked))

        names = {"axis_names": compat.manual_axes(p), "check_vma": p["check_vma"]}
        return jax.shard_map(run, mesh=None, in_specs=p["in_specs"], out_specs=p["out_specs"], **names)(*ins)

    def parameters(self, scope: Scope, i: int, eqn: Any) -> dict[str, Any]:
        """Returns an equation's parameters with marks in its jaxprs."""
        params = eqn.params
        known = {scope.env[v] for v in eqn.invars if not compat.is_literal(v)}  # a branch reads them directly
        for key, pos, jaxpr in compat.sub_jaxprs(eqn.params):
            child = scope.children.get((i, key, pos))
            if child is None:
                continue
            new = jax.make_jaxpr(self.inside(child, jaxpr, known))(*(v.aval for v in child.jaxpr.invars))
            params = compat.with_jaxpr(params, key, pos, new)
        return params

    def inside(self, child: Scope, jaxpr: Any, known: set[int | None]) -> Callable[..., list[Any]]:
        """Returns the marked body of a loop or branch; marks arguments that are separate values, such as slices."""
        values = [child.env[v] for v in child.jaxpr.invars]

        def run(*args: Any) -> list[Any]:
            args = tuple(x if v in known else self.mark(x, v) for x, v in zip(args, values, strict=True))
            return self.body(child, getattr(jaxpr, "consts", ()), args)

        return run
