"""What a pipeline is given, checked before anything compiles: the mesh in force, parameters, inputs, functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from .. import compat, paths
from ..errors import ShardingError, raise_together
from ..mesh import current
from ..spec import sizes_text
from .model import PARTS, Model
from .schedule import Schedule


def mesh_in_force(asked: str, schedule: Schedule, axis: str) -> Mesh | AbstractMesh:
    """The mesh in force, which has the axis."""
    asked = f"{asked}(axis={axis!r})"
    mesh = jax.sharding.get_abstract_mesh() if compat.in_trace() else current()
    if mesh is None or not mesh.axis_names:
        fix = f"with sharding.mesh({axis}={schedule.devices}): ..."
        raise ShardingError(asked, there="no mesh", must="a mesh with this axis is in force", fix=fix)
    sizes = dict(mesh.shape)
    there = f"the mesh {sizes_text(sizes)}"
    if axis not in sizes:
        raise ShardingError(asked, there=there, must="the mesh has this axis", fix=[f"axis={n!r}" for n in sizes][:1])
    if sizes[axis] != schedule.devices:
        raise ShardingError(
            asked,
            there=[there, f"{schedule.name} over {schedule.devices} devices"],
            must="the axis is as long as the schedule has devices",
            fix=f"sharding.mesh({axis}={schedule.devices}, ...)",
        )
    return mesh


def single_controller(asked: str, mesh: Mesh | AbstractMesh, *, fix: str = "") -> Mesh:
    """The mesh, where one process sees its devices and nothing is traced."""
    if compat.in_trace():
        raise ShardingError(asked, there="a call inside a trace (jit, grad, ...)", must="called on arrays", fix=fix)
    if jax.process_count() > 1:
        there = f"{jax.process_count()} processes"
        raise ShardingError(asked, there=there, must="one process sees all devices", fix=fix)
    if not isinstance(mesh, Mesh):
        raise ShardingError(asked, there="a mesh over described devices", must="a program runs on real devices")
    return mesh


def whole_microbatches(asked: str, schedule: Schedule) -> None:
    """Raises where a schedule cuts sequences."""
    if schedule.slices > 1:
        raise ShardingError(asked, there=f"{schedule.slices} slices of each sequence", must="whole microbatches")


def valid(asked: str, model: Model, schedule: Schedule, rows: int, params: Any, inputs: Any, targets: Any) -> None:
    """Raises where parameters, inputs or what the functions make of them can't be."""
    if model.has_ends:
        _named(asked, params)
    stages, ends = model.parts(params)
    leading(f"{asked}: stages", stages, rows, "stages" if rows == schedule.stages else "rows that pipeline.place makes")
    leading(f"{asked}: inputs", inputs, schedule.microbatches, "microbatches")
    leading(f"{asked}: targets", targets, schedule.microbatches, "microbatches")
    weights, one, target = (jax.tree.map(_one, tree) for tree in (stages, inputs, targets))
    x = jax.eval_shape(model.enter, ends, one)
    y = jax.eval_shape(model.stage_fn, weights, x)
    _kept(asked, x, y)
    loss = jax.eval_shape(model.loss, ends, y, target)
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        there = f"it returns {_text(loss)}"
        raise ShardingError(f"{asked}(loss_fn)", there=there, must="a floating scalar: the mean over a microbatch")


def _named(asked: str, params: Any) -> None:
    if isinstance(params, dict) and "stages" in params and set(params) <= set(PARTS):
        return
    there = f"the keys {', '.join(map(repr, params))}" if isinstance(params, dict) else type(params).__name__
    raise ShardingError(
        f"{asked}: params",
        there=there,
        must=f"with first_fn or last_fn, a dict of 'stages' and any of {', '.join(map(repr, PARTS))}",
    )


def leading(asked: str, tree: Any, num: int, what: str) -> None:
    """Raises where a leaf does not begin with a dim of `num`."""
    wrong = [
        ShardingError(f"{asked}/{paths.text(path)}".rstrip("/"), there=f"shape {list(jnp.shape(leaf))}")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.shape(leaf)[:1] != (num,)
    ]
    must = f"every array begins with a dim of {num}, the number of {what}"
    raise_together(asked, [ShardingError(each.asked, there=each.there, must=must) for each in wrong])


def _kept(asked: str, x: Any, y: Any) -> None:
    """Raises where a stage changes the structure, shapes or dtypes of what passes through it."""
    asked, must = f"{asked}(stage_fn)", "a stage returns what it gets: same structure, shapes and dtypes"
    if jax.tree.structure(x) != jax.tree.structure(y):
        there = [f"it gets {jax.tree.structure(x)}", f"it returns {jax.tree.structure(y)}"]
        raise ShardingError(asked, there=there, must=must)
    pairs = zip(jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(y), strict=True)
    there = [
        f"{paths.text(path) or 'x'}: it gets {_text(a)}, it returns {_text(b)}"
        for (path, a), b in pairs
        if (a.shape, a.dtype) != (b.shape, b.dtype)
    ]
    if there:
        raise ShardingError(asked, there=there, must=must, fix="first_fn and last_fn may change it")


def _one(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.result_type(leaf))


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__


def facts(leaf: Any) -> tuple[Any, ...]:
    """What a compiled program depends on."""
    return leaf.shape, leaf.dtype, leaf.sharding
