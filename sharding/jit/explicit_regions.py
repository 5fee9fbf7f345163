"""Parts of a program with Explicit axes (`jax.sharding.explicit_axes`), as parts with Auto axes and annotations.

There the sharding of an array is part of its type. XLA is given it as a constraint of every result; to propagation, to
the ledger and to the memory report that is an annotation. In the program that is returned every type is one over Auto
axes, and every result in such a part is annotated with what its type said.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from .. import compat
from ..annotations import annotate
from ..mesh import abstract, with_auto_axes
from ..spec import Dim, Spec, from_partition_spec


def without_explicit_axes(jaxpr: Any) -> Any:
    """A closed jaxpr without Explicit axes; itself if it has none, or has sums that are left open (`unreduced`)."""
    types = [aval for eqn in compat.open_jaxpr(jaxpr).eqns for inner in compat.equations(eqn) for aval in _types(inner)]
    explicit = [s for s in map(_explicit_sharding, types) if s is not None]
    if not explicit or any(getattr(s.spec, kind, None) for s in explicit for kind in ("unreduced", "reduced")):
        return jaxpr
    return _converted(jaxpr)


def _types(eqn: Any) -> list[Any]:
    return [v.aval for v in (*eqn.invars, *eqn.outvars) if not compat.is_literal(v)]


def _explicit_sharding(aval: Any) -> NamedSharding | None:
    """The sharding in a type, if it is over Explicit axes."""
    sharding = getattr(aval, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and _is_explicit(sharding.mesh) else None


def _is_explicit(mesh: Any) -> bool:
    return AxisType.Explicit in (mesh.axis_types or ())


def _converted(jaxpr: Any) -> Any:
    opened = compat.open_jaxpr(jaxpr)
    names: dict[Any, Any] = {v: _variable(v) for v in (*opened.constvars, *opened.invars)}
    eqns: list[Any] = []
    for eqn in opened.eqns:
        operands = [v if compat.is_literal(v) else names.get(v, v) for v in eqn.invars]
        if eqn.primitive.name in ("reshard", "mesh_cast"):
            results = operands
        else:
            results = [v if compat.is_drop(v) else _variable(v) for v in eqn.outvars]
            eqns.append(_equation(eqn, operands, results))
        has_body = any(True for _ in compat.sub_jaxprs(eqn.params))
        for v, result in zip(eqn.outvars, results, strict=True):
            sharding = None if has_body else _explicit_sharding(v.aval)
            names[v] = result if sharding is None else _annotated(eqn, result, sharding, eqns)
    outvars = [v if compat.is_literal(v) else names.get(v, v) for v in opened.outvars]
    new = compat.rebuild(opened, eqns=eqns, outvars=outvars, invars=[names[v] for v in opened.invars])
    new = new.replace(constvars=[names[v] for v in opened.constvars])
    closed = isinstance(jaxpr, jex.ClosedJaxpr)
    return jex.ClosedJaxpr(new, [*map(_constant, compat.constants(jaxpr))]) if closed else new


def _constant(x: Any) -> Any:
    """An array that the program closes over, on a mesh with Auto axes."""
    sharding = _explicit_sharding(x) if isinstance(x, jax.Array) else None
    if sharding is None or not isinstance(sharding.mesh, jax.sharding.Mesh):
        return x
    return jax.device_put(x, NamedSharding(with_auto_axes(sharding.mesh), sharding.spec))


def _variable(v: Any) -> Any:
    """A variable with its type over Auto axes; itself if it has no other."""
    sharding = _explicit_sharding(v.aval)
    return v if sharding is None else jex.Var(v.aval.update(sharding=_auto_sharding(sharding)))


def _auto_sharding(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(_auto_mesh(sharding.mesh), jax.P(*[None] * len(sharding.spec)))


def _auto_mesh(mesh: Any) -> AbstractMesh:
    return abstract(with_auto_axes(mesh))


def _equation(eqn: Any, operands: list[Any], results: list[Any]) -> Any:
    params = {key: _parameter(key, value) for key, value in eqn.params.items()}
    mesh = eqn.ctx.cur_abstract_mesh
    if not _is_explicit(mesh):
        return eqn.replace(invars=operands, outvars=results, params=params)
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(_auto_mesh(mesh)):
        return jex.new_jaxpr_eqn(operands, results, eqn.primitive, params, eqn.effects, eqn.source_info)


def _parameter(key: str, value: Any) -> Any:
    """A parameter without Explicit axes; the sharding of the result is none of the equation's, but annotated."""
    if compat.is_jaxpr(value):
        return _converted(value)
    if isinstance(value, (tuple, list)):
        make = getattr(type(value), "_make", type(value))
        return make([_parameter(key, one) for one in value])
    if isinstance(value, (AbstractMesh, jax.sharding.Mesh)) and _is_explicit(value):
        return _auto_mesh(value)
    if isinstance(value, NamedSharding) and _is_explicit(value.mesh):
        return None if key in ("out_sharding", "sharding") else NamedSharding(_auto_mesh(value.mesh), value.spec)
    return value


def _annotated(eqn: Any, var: Any, sharding: NamedSharding, eqns: list[Any]) -> Any:
    """Appends the annotation of a variable by its type, and returns the result."""
    mesh = _auto_mesh(sharding.mesh)
    if mesh.manual_axes or not var.aval.shape:
        return var
    spec = from_partition_spec(sharding.spec, var.aval.shape, dict(mesh.shape), asked="explicit_axes")
    if AxisType.Auto in sharding.mesh.axis_types:
        spec = Spec(dims=tuple(Dim(axes=dim.axes, open=True) for dim in spec.dims))
    result = jex.Var(var.aval)
    params = annotate.completed(spec, mesh, asked=spec)
    with jax.sharding.use_abstract_mesh(mesh):
        eqns.append(jex.new_jaxpr_eqn([var], [result], annotate.annotate_p, params, set(), eqn.source_info))
    return result
