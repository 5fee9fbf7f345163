"""Graph of `shard_map` and `custom_linear_solve`: bodies that run once, on other arguments than the equation's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import compat
from ..rules import Rule, RuleBuilder
from ..spec import Dim, Spec
from .annotation import Annotation
from .from_jaxpr import Builder
from .graph import Scope, line


def linear_solve(b: Builder, scope: Scope, i: int, eqn: Any, times: int) -> None:
    """Adds the `solve` body of a `custom_linear_solve`; its other bodies are for derivatives."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first, num_consts = lengths.matvec + lengths.vecmat, sum(lengths)
    operands = [*eqn.invars[first : first + lengths.solve], *eqn.invars[num_consts:]]
    scalars = [scope.scalars_of([a]) for a in operands]
    child = b.body(eqn, jaxprs.solve, [b.read(scope, a) for a in operands], times, scalars)
    scope.children[i, "jaxprs", jaxprs.index(jaxprs.solve)] = child
    b.bind(scope, eqn, b.outs(child))
    for var, inner in zip(eqn.outvars, child.jaxpr.outvars, strict=True):
        if not compat.is_drop(var) and scope.env[var] is None and (found := child.scalars_of([inner])):
            scope.scalars[var] = found


def shard_map(b: Builder, scope: Scope, i: int, eqn: Any, times: int) -> None:
    """Adds the body of a `shard_map`, through which shardings propagate along the axes that are not manual.

    Its operands and results are sharded by `in_specs` and `out_specs`; other axes may follow those. Inside, shapes are
    local along the manual axes, and no value can be sharded over these.
    """
    manual, sizes = compat.manual_axes(eqn.params), dict(eqn.params["mesh"].shape)
    if any(b.sizes.get(axis) != sizes[axis] for axis in manual):  # not the mesh that propagation is for
        b.plain(scope, i, eqn, times)
        return
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    around, b.manual = b.manual, b.manual | manual
    first = len(b.graph.shapes)
    entries, inner = [], []
    for atom, var, spec in zip(eqn.invars, body.invars, eqn.params["in_specs"], strict=True):
        source, outside = b.use(b.read(scope, atom), atom.aval), b.value(atom.aval, eqn)
        b.edge([source], outside, eqn, times)
        b.depend([outside], scope.scalars_of([atom]))
        inside = b.value(var.aval, eqn)
        boundary = _annotate_boundary(b, outside, spec, f"in_specs of the shard_map at {line((eqn, *b.around))}")
        rule = _boundary_rule(b.graph.shapes[outside], boundary, sizes, outward=False)
        b.op("shard_map", [outside], [inside], rule, eqn, times)
        entries.append(outside)
        inner.append(inside)
    if any(size > 1 for axis, size in b.sizes.items() if axis not in b.manual):
        child = b.body(eqn, body, inner, times)
        scope.children[i, "jaxpr", 0] = child
        inner_results = [b.use(a, v.aval) for a, v in zip(b.outs(child), body.outvars, strict=True)]
        scalars = [child.scalars_of([v]) for v in body.outvars]
    else:
        inner_results = [b.value(v.aval, eqn) for v in body.outvars]
        scalars = [set(inner)] * len(inner_results)  # the body is not in the graph: a result may depend on any operand
    results = []
    rows = zip(inner_results, scalars, eqn.outvars, eqn.params["out_specs"], strict=True)
    for inside, found, var, spec in rows:
        outside = b.value(var.aval, eqn)
        b.depend([inside], found)
        boundary = _annotate_boundary(b, outside, spec, f"out_specs of the shard_map at {line((eqn, *b.around))}")
        rule = _boundary_rule(b.graph.shapes[outside], boundary, sizes, outward=True)
        b.op("shard_map", [inside], [outside], rule, eqn, times)
        results.append(outside)
    for v in range(first, len(b.graph.shapes)):
        annotation = b.graph.annotations.get(v)
        own = {axis for dim in annotation.spec.dims for axis in dim.axes} if annotation is not None else set()
        b.graph.manual[v] = b.graph.manual.get(v, frozenset()) | (manual - own)
    b.manual = around
    scope.entries[i] = entries
    b.bind(scope, eqn, results)


def _annotate_boundary(b: Builder, value: int, pspec: Any, origin: str) -> Spec:
    """Annotates a value outside a `shard_map` with its axes there; other axes may follow them."""
    b.targets.add(value)
    spec = b.checked(pspec, value)
    assert spec is not None
    spec = Spec(dims=tuple(Dim(axes=dim.axes, open=True) for dim in spec.dims))
    if any(dim.axes for dim in spec.dims):
        b.graph.annotations[value] = Annotation(spec=spec, origin=origin)
    return spec


def _boundary_rule(shape: Sequence[int], spec: Spec, sizes: dict[str, int], *, outward: bool) -> Rule:
    """Returns the rule between a value outside and its local shard: manual axes are the major factor of a dim."""
    counts = [math.prod(sizes[str(axis)] for axis in dim.axes) for dim in spec.dims]
    outside, inside = tuple(shape), tuple(n // k for n, k in zip(shape, counts, strict=True))
    ins, outs = ([inside], [outside]) if outward else ([outside], [inside])
    rule = RuleBuilder(ins, outs)
    for d, (k, n) in enumerate(zip(counts, inside, strict=True)):
        if k > 1:
            rule.factor([None if outward else d], [d if outward else None], k)
        rule.factor([d], [d], n)
    return rule.build()
