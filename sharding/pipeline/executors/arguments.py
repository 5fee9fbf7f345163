"""What a pipeline is given, checked before anything compiles: the mesh in force, parameters, inputs, functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ... import compat, paths
from ...errors import ShardingError, raise_together
from ...mesh import current
from ...spec import sizes_text
from ..schedule import Schedule
from .model import PARTS, Model
from .parts import Slices


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


def whole_microbatches(asked: str, schedule: Schedule, *, fix: str = "") -> None:
    """Raises where a schedule cuts sequences."""
    if schedule.slices > 1:
        there = f"{schedule.slices} slices of each sequence"
        raise ShardingError(asked, there=there, must="whole microbatches", fix=fix)


def valid(
    asked: str, model: Model, schedule: Schedule, rows: int, params: Any, inputs: Slices, targets: Slices
) -> list[tuple[Any, Any]]:
    """Raises where parameters, inputs or what the functions make of them can't be.

    Returns:
        For each slice the shapes of what the first stage gets, and of the context that a stage leaves.
    """
    if model.has_ends:
        _named(asked, params)
    stages, ends = model.parts(params)
    leading(f"{asked}: stages", stages, rows, "stages" if rows == schedule.stages else "rows that pipeline.place makes")
    weights, context = jax.tree.map(_one, stages), jax.eval_shape(lambda: model.context)
    _one_per_slice(asked, schedule, inputs=inputs, targets=targets)
    found = []
    for part, (own, target) in enumerate(zip(inputs, targets, strict=True)):
        of = f"[{part}]" if context is not None else ""
        leading(f"{asked}: inputs{of}", own, schedule.microbatches, "microbatches")
        leading(f"{asked}: targets{of}", target, schedule.microbatches, "microbatches")
        x = jax.eval_shape(model.enter, ends, jax.tree.map(_one, own))
        y, context = _stepped(asked, model, weights, x, context)
        loss = jax.eval_shape(model.loss, ends, y, jax.tree.map(_one, target))
        if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            there = f"it returns {_text(loss)}"
            raise ShardingError(f"{asked}(loss_fn)", there=there, must="a floating scalar: the mean over a microbatch")
        found.append((x, context))
    return found


def one_shape(asked: str, model: Model, slices: Sequence[tuple[Any, Any]]) -> None:
    """Raises where slices differ in shape, or a context grows.

    Args:
        asked: by whom.
        model: whose context they get.
        slices: as ``valid`` has found them.
    """
    must = "in one program all slices are of one shape, and so are their contexts"
    xs, contexts = zip(*slices, strict=True)
    for name, first, others in (("inputs", xs[0], xs[1:]), ("context", model.context, contexts)):
        for other in others:
            if there := _differences(first, other):
                raise ShardingError(f"{asked}: {name}", there=there, must=must, fix="executor='mpmd'")


def _one_per_slice(asked: str, schedule: Schedule, **given: Any) -> None:
    for name, slices in given.items():
        num = len(slices) if isinstance(slices, (list, tuple)) else None
        if num != schedule.slices:
            raise ShardingError(
                f"{asked}: {name}",
                there=type(slices).__name__ if num is None else f"{num} of them",
                must=f"a list of one pytree for each of the {schedule.slices} slices",
            )


def _stepped(asked: str, model: Model, weights: Any, x: Any, context: Any) -> tuple[Any, Any]:
    """What a stage makes of a slice, and the next one's context."""
    if context is None:
        y = jax.eval_shape(model.stage_fn, weights, x)
        _kept(asked, x, y)
        return y, None
    found = jax.eval_shape(model.stage_fn, weights, x, context)
    must = "with a context a stage returns y and the next slice's context"
    if not isinstance(found, tuple) or len(found) != 2:
        raise ShardingError(f"{asked}(stage_fn)", there=f"it returns {jax.tree.structure(found)}", must=must)
    y, after = found
    _kept(asked, x, y)
    kinds = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (context, after)]
    if jax.tree.structure(context) != jax.tree.structure(after) or kinds[0] != kinds[1]:
        there = [f"it gets {_texts(context)}", f"it returns {_texts(after)}"]
        raise ShardingError(
            f"{asked}(stage_fn): context", there=there, must="contexts of one structure, of the same dtypes"
        )
    return y, after


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
    there = _differences(x, y)
    if there:
        raise ShardingError(asked, there=there, must=must, fix="first_fn and last_fn may change it")


def _differences(x: Any, y: Any) -> list[str]:
    """Leaves of trees of one structure that differ in shape or dtype."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(y), strict=True)
    return [
        f"{paths.text(path) or 'x'}: it gets {_text(a)}, it returns {_text(b)}"
        for (path, a), b in pairs
        if (a.shape, a.dtype) != (b.shape, b.dtype)
    ]


def _texts(tree: Any) -> str:
    return f"{jax.tree.structure(tree)} of {', '.join(map(_text, jax.tree.leaves(tree)))}"


def _one(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.result_type(leaf))


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__


def facts(leaf: Any) -> tuple[Any, ...]:
    """What a compiled program depends on."""
    return leaf.shape, leaf.dtype, leaf.sharding
