"""Validation of a pipeline's mesh, parameters, inputs and functions, before compilation."""

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
from .activations import array_type, check_preserved, differences
from .pipelined_model import PARAM_KEYS, Model
from .stage_meshes import Slices


def current_mesh(asked: str, schedule: Schedule, axis: str) -> Mesh | AbstractMesh:
    """The current mesh, which must have the axis."""
    asked = f"{asked}(axis={axis!r})"
    mesh = jax.sharding.get_abstract_mesh() if compat.in_trace() else current()
    if mesh is None or not mesh.axis_names:
        fix = f"with sharding.mesh({axis}={schedule.devices}): ..."
        raise ShardingError(asked, found="no mesh", required="a mesh with this axis", fix=fix)
    sizes = dict(mesh.shape)
    found_text = f"the mesh {sizes_text(sizes)}"
    if axis not in sizes:
        raise ShardingError(
            asked, found=found_text, required="an axis of the mesh", fix=[f"axis={n!r}" for n in sizes][:1]
        )
    if sizes[axis] != schedule.devices:
        raise ShardingError(
            asked,
            found=[found_text, f"{schedule.name} over {schedule.devices} devices"],
            required="an axis of the size of the schedule's number of devices",
            fix=f"sharding.mesh({axis}={schedule.devices}, ...)",
        )
    return mesh


def single_controller(asked: str, mesh: Mesh | AbstractMesh, *, fix: str = "") -> Mesh:
    """The mesh; raises inside a trace, with several processes, and for described devices."""
    if compat.in_trace():
        raise ShardingError(asked, found="a call inside a trace (jit, grad, ...)", required="concrete arrays", fix=fix)
    if jax.process_count() > 1:
        found_text = f"{jax.process_count()} processes"
        raise ShardingError(asked, found=found_text, required="a single process with all devices", fix=fix)
    if not isinstance(mesh, Mesh):
        raise ShardingError(asked, found="a mesh over described devices", required="attached devices")
    return mesh


def check_unsliced(asked: str, schedule: Schedule, *, fix: str = "") -> None:
    """Raises if a schedule slices sequences."""
    if schedule.slices > 1:
        found_text = f"{schedule.slices} slices per sequence"
        raise ShardingError(asked, found=found_text, required="a schedule without slices", fix=fix)


def check_inputs(
    asked: str, model: Model, schedule: Schedule, rows: int, params: Any, inputs: Slices, targets: Slices
) -> list[tuple[Any, Any]]:
    """Raises for invalid parameters or inputs, or if the functions' outputs do not match.

    Returns:
        For each slice, the shapes of the first stage's input and of the context that a stage returns.
    """
    if model.has_ends:
        _check_keys(asked, params)
    stages, ends = model.partition(params)
    check_leading_dim(
        f"{asked}: stages", stages, rows, "stages" if rows == schedule.stages else "rows of pipeline.place"
    )
    weights, context = jax.tree.map(_element_shape, stages), jax.eval_shape(lambda: model.context)
    _check_one_per_slice(asked, schedule, inputs=inputs, targets=targets)
    found = []
    for part, (own, target) in enumerate(zip(inputs, targets, strict=True)):
        of = f"[{part}]" if context is not None else ""
        check_leading_dim(f"{asked}: inputs{of}", own, schedule.microbatches, "microbatches")
        check_leading_dim(f"{asked}: targets{of}", target, schedule.microbatches, "microbatches")
        x = jax.eval_shape(model.enter, ends, jax.tree.map(_element_shape, own))
        y, context = _stage_output_shapes(asked, model, weights, x, context)
        loss = jax.eval_shape(model.loss, ends, y, jax.tree.map(_element_shape, target))
        if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            found_text = f"it returns {array_type(loss)}"
            raise ShardingError(
                f"{asked}(loss_fn)", found=found_text, required="a floating-point scalar: the mean over a microbatch"
            )
        found.append((x, context))
    return found


def check_equal_slices(asked: str, model: Model, slices: Sequence[tuple[Any, Any]]) -> None:
    """Raises if slices differ in shape, or a context grows.

    Args:
        asked: name of the caller.
        model: with the initial context.
        slices: from ``check_inputs``.
    """
    must = "slices of one shape and contexts of one shape, in a single program"
    xs, contexts = zip(*slices, strict=True)
    for name, first, others in (("inputs", xs[0], xs[1:]), ("context", model.context, contexts)):
        for other in others:
            if found_text := differences(first, other):
                raise ShardingError(f"{asked}: {name}", found=found_text, required=must, fix="executor='mpmd'")


def _check_one_per_slice(asked: str, schedule: Schedule, **given: Any) -> None:
    for name, slices in given.items():
        num = len(slices) if isinstance(slices, (list, tuple)) else None
        if num != schedule.slices:
            raise ShardingError(
                f"{asked}: {name}",
                found=type(slices).__name__ if num is None else f"{num} slices",
                required=f"a list with one pytree per slice, {schedule.slices} in total",
            )


def _stage_output_shapes(asked: str, model: Model, weights: Any, x: Any, context: Any) -> tuple[Any, Any]:
    """Shapes of a stage's output and of the next slice's context."""
    if context is None:
        y = jax.eval_shape(model.stage_fn, weights, x)
        check_preserved(asked, x, y)
        return y, None
    found = jax.eval_shape(model.stage_fn, weights, x, context)
    must = "with a context: (y, the next slice's context)"
    if not isinstance(found, tuple) or len(found) != 2:
        raise ShardingError(f"{asked}(stage_fn)", found=f"it returns {jax.tree.structure(found)}", required=must)
    y, after = found
    check_preserved(asked, x, y)
    kinds = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (context, after)]
    if jax.tree.structure(context) != jax.tree.structure(after) or kinds[0] != kinds[1]:
        found_text = [f"it gets {_texts(context)}", f"it returns {_texts(after)}"]
        raise ShardingError(
            f"{asked}(stage_fn): context", found=found_text, required="contexts of one structure, with equal dtypes"
        )
    return y, after


def _check_keys(asked: str, params: Any) -> None:
    if isinstance(params, dict) and "stages" in params and set(params) <= set(PARAM_KEYS):
        return
    found_text = f"the keys {', '.join(map(repr, params))}" if isinstance(params, dict) else type(params).__name__
    raise ShardingError(
        f"{asked}: params",
        found=found_text,
        required=f"with first_fn or last_fn: a dict of 'stages' and any of {', '.join(map(repr, PARAM_KEYS))}",
    )


def check_leading_dim(asked: str, tree: Any, num: int, what: str) -> None:
    """Raises unless every leaf has a leading dim of `num`."""
    wrong = [
        ShardingError(f"{asked}/{paths.text(path)}".rstrip("/"), found=f"shape {list(jnp.shape(leaf))}")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.shape(leaf)[:1] != (num,)
    ]
    must = f"a leading dim of {num}, the number of {what}"
    raise_together(asked, [ShardingError(each.asked, found=each.found, required=must) for each in wrong])


def _texts(tree: Any) -> str:
    return f"{jax.tree.structure(tree)} of {', '.join(map(array_type, jax.tree.leaves(tree)))}"


def _element_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.result_type(leaf))


def signature(leaf: Any) -> tuple[Any, ...]:
    """The properties of an array on which a compiled program depends."""
    return leaf.shape, leaf.dtype, leaf.sharding
