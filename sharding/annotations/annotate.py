"""`annotate`: constrains the sharding of an array inside a program and names it.

A primitive carries spec, priority and name through tracing, differentiation, batching, `scan` and remat to
`sharding.jit`. Elsewhere it lowers to a sharding constraint, so an annotated program runs the same under `jax.jit`. The
rewriter emits the same primitive: there `spec` is the inferred spec, which is lowered, and `asked` the user's
annotation, if any, from which an enclosing `sharding.jit` infers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
from jax.experimental import jet
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import compat
from ..errors import ShardingError, raise_together
from ..mesh import current
from ..spec import OPEN, Axis, Dim, Spec, divisible, limited_to, to_partition_spec
from . import axis_rules, flax_metadata
from .padding import warn_padding

annotate_p = jex.Primitive("annotate")


def annotate(x: Any, spec: P | None = None, *, name: str | None = None, priority: int = 0) -> Any:
    """Returns `x`, constrained to `spec` and named.

    Args:
        x: an array, or a pytree of arrays that all get the same annotation.
        spec: `None` entries and missing trailing dims are replicated and closed, `P.UNCONSTRAINED` dims are inferred,
            `("data", ...)` is at least `data`; logical names are resolved by `axis_rules`. Without a spec, a flax nnx
            Variable gets its own (`nnx.with_partitioning`), so `annotate(model)` annotates the parameters of a model,
            or of an optimizer's state; other arrays are only named.
        name: the name for `Completion.spec` and `.why`. A repeated name becomes `name#0`, `name#1`, ...
        priority: 0 is propagated first; a higher number waits until all lower ones have converged.

    Raises:
        ShardingError: no mesh, unknown axis or name, axis used twice, more entries than dims.

    The gradient of an annotated array gets the same spec. A dim not divisible by its axes is padded, with a warning
    that states the cost; `sharding.jit(..., strict=True)` makes it an error.

    Example:
        >>> import jax
        >>> import sharding
        >>> from sharding import P
        >>> def layer(x, w):
        ...     return sharding.annotate(x @ sharding.annotate(w, P(None, "tensor")), name="hidden")
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> with sharding.mesh(data=2, tensor=4):
        ...     print(sharding.jit(layer).complete(x, x).spec("hidden"))
        P(None, 'tensor')
    """
    leaves, tree = jax.tree.flatten(x)
    label = "x" if name is None else repr(name)
    metadata = flax_metadata.of_leaves(x) if spec is None else [None] * len(leaves)
    failures = []
    for i, (leaf, variable) in enumerate(zip(leaves, metadata, strict=True)):
        if variable is None:
            leaves[i] = _annotate_leaf(leaf, spec, what=label, name=name, priority=priority)
            continue
        try:
            with variable.rules:
                leaves[i] = _annotate_leaf(leaf, variable.spec, what=variable.path, name=name, priority=priority)
        except ShardingError as e:
            failures.append(e)
    raise_together("sharding.annotate(...)", failures)
    return jax.tree.unflatten(tree, leaves)


def _annotate_leaf(x: Any, spec: P | None, *, what: str, name: str | None, priority: int) -> Any:
    if spec is None:
        return annotate_p.bind(x, mesh=None, spec=None, asked=None, name=name)
    mesh = current()
    asked = f"sharding.annotate({what}, {spec})"
    if mesh is None:
        raise ShardingError(
            asked,
            found="no mesh",
            required="a mesh, whose axes the spec names",
            fix="put the call, and the jit around it, inside `with sharding.mesh(...)`",
        )
    shape, seen = tuple(jax.numpy.shape(x)), _abstract(mesh)
    sizes = {n: size for n, size in seen.shape.items() if n not in seen.manual_axes}
    resolved = axis_rules.resolve(spec, shape, sizes, asked=asked, priority=priority)
    warn_padding(resolved, x, sizes, asked)
    if seen.explicit_axes and compat.in_trace():
        return _resharded(x, resolved, seen)
    return bind(x, resolved, seen, name=name)


def bind(x: Any, spec: Spec, mesh: AbstractMesh, *, name: str | None = None) -> Any:
    """Binds the primitive with a checked spec."""
    return annotate_p.bind(x, mesh=mesh, spec=spec, asked=spec, name=name)


def completed(spec: Spec, mesh: AbstractMesh, *, asked: Spec | None = None, name: str | None = None) -> dict[str, Any]:
    """The primitive's parameters for an inferred spec, set by the rewriter."""
    return {"mesh": mesh, "spec": spec, "asked": asked, "name": name}


def _resharded(x: Any, spec: Spec, mesh: AbstractMesh) -> Any:
    """`x` with a spec over the Explicit axes in its type; its open dims keep theirs, with axes that the spec leaves."""
    entries = list(limited_to(to_partition_spec(spec), mesh.explicit_axes))
    entries += [None] * (len(spec.dims) - len(entries))
    used = {name for dim in spec.dims for name in dim.axes}
    for i, (dim, has) in enumerate(zip(spec.dims, jax.typeof(x).sharding.spec, strict=True)):
        if dim.open and not dim.axes and used.isdisjoint(has if isinstance(has, tuple) else (has,)):
            entries[i] = has
    return jax.sharding.reshard(x, P(*entries))


def _abstract(mesh: Any) -> AbstractMesh:
    inside = jax.sharding.get_abstract_mesh()
    if not inside.empty and inside.shape_tuple == mesh.shape_tuple:
        return inside  # in the body of a shard_map some of its axes are Manual
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def _constraint(x: Any, *, mesh: AbstractMesh | None, spec: Spec | None, **_: Any) -> Any:
    if spec is None or mesh is None or spec.is_open or jax.typeof(x).sharding.mesh.explicit_axes:
        return x  # Explicit axes are in its type
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, to_partition_spec(spec, keep_open=True)))


def _eager(x: Any, *, mesh: AbstractMesh | None, spec: Spec | None, **_: Any) -> Any:
    real = current()
    x = jax.numpy.asarray(x)
    if spec is None or not isinstance(real, jax.sharding.Mesh) or (mesh and mesh.axis_names != real.axis_names):
        return x
    fits = divisible(spec, x.shape, dict(real.shape))  # XLA can pad only inside a program
    place = jax.sharding.reshard if AxisType.Explicit in real.axis_types else jax.lax.with_sharding_constraint
    return place(x, NamedSharding(real, to_partition_spec(fits)))


def _jvp(primals: Any, tangents: Any, *, name: str | None, **kw: Any) -> Any:
    (x,), (t,) = primals, tangents
    if not isinstance(t, compat.ad.Zero):
        t = annotate_p.bind(t, name=None, **kw)
    return annotate_p.bind(x, name=name, **kw), t


def _transpose(ct: Any, _: Any, **kw: Any) -> Any:
    return [ct if isinstance(ct, compat.ad.Zero) else annotate_p.bind(ct, **kw)]


def _batch(axis: Any, args: Any, dims: Any, *, spec: Spec | None, asked: Spec | None, **kw: Any) -> Any:
    (x,), (d,) = args, dims
    if d is None:
        return annotate_p.bind(x, spec=spec, asked=asked, **kw), d
    dim = OPEN if axis.spmd_name is None else Dim(axes=tuple(axis.spmd_name))
    if asked is not None and _has_any(asked, dim.axes):
        raise ShardingError(
            f"jax.vmap(..., spmd_axis_name={axis.spmd_name})",
            found=f"an array annotated with {to_partition_spec(asked, keep_open=True)}",
            required="an axis for the vmapped dim that no annotation of the vmapped function has",
            fix=["another spmd_axis_name", "another axis in the annotation"],
        )
    if spec is not None and _has_any(spec, dim.axes):  # only inferred
        kept = (replace(own, axes=tuple(a for a in own.axes if a not in dim.axes)) for own in spec.dims)
        spec = replace(spec, dims=tuple(kept))
    return annotate_p.bind(x, spec=_with_dim(spec, d, dim), asked=_with_dim(asked, d, dim), **kw), d


def _has_any(spec: Spec, axes: Sequence[Axis]) -> bool:
    return any(axis in dim.axes for axis in axes for dim in spec.dims)


def _with_dim(spec: Spec | None, d: int, dim: Dim) -> Spec | None:
    return None if spec is None else Spec(dims=(*spec.dims[:d], dim, *spec.dims[d:]), unreduced=spec.unreduced)


annotate_p.def_impl(_eager)
annotate_p.def_abstract_eval(lambda x, **_: x)
jet.deflinear(annotate_p)
compat.ad.primitive_jvps[annotate_p] = _jvp
compat.ad.primitive_transposes[annotate_p] = _transpose
compat.batching.fancy_primitive_batchers[annotate_p] = _batch
compat.mlir.register_lowering(annotate_p, compat.mlir.lower_fun(_constraint, multiple_results=False))
