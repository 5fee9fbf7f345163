"""The loss of a pipelined model and its gradients, by any synchronous schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .. import compat, paths
from ..errors import ShardingError, raise_together
from ..mesh import current
from .lockstep import device_stages
from .model import PARTS, LossFn, Model, Remat, StageFn
from .one_program import one_program
from .parts import Parts
from .per_stage import Step
from .schedule import Schedule

Executor = Literal["spmd", "mpmd"]
ValueAndGrad = Callable[[Any, Any, Any], tuple[jax.Array, Any]]
"""params, inputs, targets -> the mean loss over all microbatches, and its gradients in the form of params."""


def value_and_grad(
    stage_fn: StageFn,
    loss_fn: LossFn,
    schedule: Schedule,
    *,
    axis: str = "pipe",
    first_fn: Callable[..., Any] | None = None,
    last_fn: Callable[..., Any] | None = None,
    remat: Remat = None,
    placed: bool = False,
    executor: Executor = "spmd",
) -> ValueAndGrad:
    """The loss and gradients of a model cut into stages along a mesh axis, equal to those of the model as a whole.

    The function that comes back takes:

    - params: one pytree with leaves [stages, ...], in the order of the model. Where ``first_fn`` or ``last_fn`` is
      given, a dict of ``"stages"``, that pytree, and ``"first"``, ``"last"`` and ``"shared"`` (what both use, such as a
      tied embedding), whatever there is of these.
    - inputs, targets: pytrees with leaves [microbatches, ...].

    Axes of the mesh other than ``axis`` are split as the arrays are and as annotations inside the functions say.

    Args:
        stage_fn: (one stage's parameters, x) -> y, of the same structure, shapes and dtypes as x. What is to reach
            later stages rides in x: a random key, or an auxiliary loss that ``loss_fn`` adds.
        loss_fn: (y of the last stage, or what ``last_fn`` makes of it, target) -> the mean loss over one microbatch.
        schedule: synchronous: all of a step's gradients are of the same weights.
        axis: of the mesh; as long as the schedule has devices.
        first_fn: (params["first"], input) -> x; with ``"shared"`` a third argument. Run again in the backward.
        last_fn: (params["last"], y) -> output; with ``"shared"`` a third argument. Its backward follows at once.
        remat: whether a stage's forward is run again for its backward, which then keeps its input alone; a policy of
            ``jax.checkpoint`` says what else it keeps.
        placed: whether the stages' parameters are in the order of devices (see ``place``), and so the gradients.
        executor: ``"spmd"``: one XLA program, for use inside ``sharding.jit`` or ``jax.jit``; devices begin each task
            together. ``"mpmd"``: a program per task and device, each started as early as it can be; called outside
            traces, by a single process.

    Raises:
        ShardingError: before anything compiles: a schedule that can't run or isn't synchronous, no such axis, another
            number of devices, stages or microbatches, or a stage that changes the shape of x.

    References:
        Narayanan et al., PipeDream-2BW, ICML 2021 (2006.09503), section 2 (PipeDream-Flush); Qi et al., Zero Bubble
        Pipeline Parallelism, ICLR 2024 (2401.10241), section 2 for backwards in two parts. There as here the weight
        part uses what the input part made.
    """
    _synchronous(schedule)
    if executor not in ("spmd", "mpmd"):
        raise ShardingError("pipeline.value_and_grad(executor)", there=repr(executor), must="'spmd' or 'mpmd'")
    model = Model(stage_fn=stage_fn, loss_fn=loss_fn, first_fn=first_fn, last_fn=last_fn, remat=remat)
    rows = _rows(schedule) if placed else tuple(range(schedule.stages))
    steps: dict[Any, Step] = {}

    def run(params: Any, inputs: Any, targets: Any) -> tuple[jax.Array, Any]:
        mesh = _mesh(schedule, axis)
        _valid(model, schedule, len(rows), params, inputs, targets)
        if executor == "spmd":
            return one_program(model, schedule, axis=axis, rows=rows)(params, inputs, targets)
        real = _single_controller(mesh)
        params, inputs, targets = jax.tree.map(jnp.asarray, (params, inputs, targets))
        stages, ends = model.parts(params)
        key = real, jax.tree.structure((params, inputs, targets)), tuple(map(_facts, jax.tree.leaves((params, inputs))))
        if key not in steps:
            parts = Parts(mesh=real, axis=axis, schedule=schedule, rows=rows)
            steps[key] = Step(model, schedule, parts, stages, ends, inputs)
        loss, gradients, end_gradients = steps[key](stages, ends, inputs, targets)
        return loss, model.whole(gradients, end_gradients, params)

    return run


def place(stages: Any, schedule: Schedule) -> Any:
    """Stages' parameters in the order of devices, for ``value_and_grad(placed=True)``: nothing has to move in a step.

    Done once, where the schedule has them in another order than the model: several chunks on a device, or stages in the
    form of a V. Where a stage is on two devices (Chimera) both have a copy and get the gradient of both.

    Args:
        stages: a pytree with leaves [stages, ...] in the order of the model.
        schedule: whose devices.

    Returns:
        The same with leaves [devices x stages of a device, ...].
    """
    _leading(f"pipeline.place(stages, {schedule.name})", stages, schedule.stages, "stages")
    rows = np.array(_rows(schedule))
    return jax.tree.map(lambda leaf: leaf[rows], stages)


def _rows(schedule: Schedule) -> tuple[int, ...]:
    return tuple(stage for own in device_stages(schedule) for stage in own)


def _synchronous(schedule: Schedule) -> None:
    asked = f"pipeline.value_and_grad(schedule={schedule.name!r})"
    schedule.check()
    if schedule.slices > 1:
        raise ShardingError(asked, there=f"{schedule.slices} slices of each sequence", must="whole microbatches")
    versions = {task.version for order in schedule.orders for task in order}
    if versions != {0} or schedule.microbatches_per_update != schedule.microbatches:
        raise ShardingError(
            asked,
            there=f"weights change after every {schedule.microbatches_per_update} of {schedule.microbatches}"
            " microbatches",
            must="all gradients of a step are of the same weights",
            fix="a synchronous schedule, such as pipeline.schedules.one_f_one_b",
        )


def _mesh(schedule: Schedule, axis: str) -> Mesh | AbstractMesh:
    """The mesh in force, which has the axis."""
    asked = f"pipeline.value_and_grad(axis={axis!r})"
    mesh = jax.sharding.get_abstract_mesh() if compat.in_trace() else current()
    if mesh is None or not mesh.axis_names:
        fix = f"with sharding.mesh({axis}={schedule.devices}): ..."
        raise ShardingError(asked, there="no mesh", must="a mesh with this axis is in force", fix=fix)
    sizes = dict(mesh.shape)
    there = "the mesh " + ", ".join(f"{name}={size}" for name, size in sizes.items())
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


def _single_controller(mesh: Mesh | AbstractMesh) -> Mesh:
    asked = "pipeline.value_and_grad(executor='mpmd')"
    fix = "executor='spmd'"
    if compat.in_trace():
        raise ShardingError(asked, there="a call inside a trace (jit, grad, ...)", must="called on arrays", fix=fix)
    if jax.process_count() > 1:
        there = f"{jax.process_count()} processes"
        raise ShardingError(asked, there=there, must="one process sees all devices", fix=fix)
    if not isinstance(mesh, Mesh):
        raise ShardingError(asked, there="a mesh over described devices", must="a program runs on real devices")
    return mesh


def _valid(model: Model, schedule: Schedule, rows: int, params: Any, inputs: Any, targets: Any) -> None:
    """Raises where parameters, inputs or what the functions make of them can't be."""
    asked = "pipeline.value_and_grad"
    if model.has_ends:
        _named(asked, params)
    stages, ends = model.parts(params)
    _leading(f"{asked}: stages", stages, rows, "stages")
    _leading(f"{asked}: inputs", inputs, schedule.microbatches, "microbatches")
    _leading(f"{asked}: targets", targets, schedule.microbatches, "microbatches")
    weights, one, target = (jax.tree.map(_one, tree) for tree in (stages, inputs, targets))
    x = jax.eval_shape(model.enter, ends, one)
    y = jax.eval_shape(model.stage_fn, weights, x)
    _kept(x, y)
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


def _leading(asked: str, tree: Any, num: int, what: str) -> None:
    """Raises where a leaf does not begin with a dim of `num`."""
    wrong = [
        ShardingError(f"{asked}/{paths.text(path)}".rstrip("/"), there=f"shape {list(jnp.shape(leaf))}")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.shape(leaf)[:1] != (num,)
    ]
    must = f"every array begins with a dim of {num}, the number of {what}"
    raise_together(asked, [ShardingError(each.asked, there=each.there, must=must) for each in wrong])


def _kept(x: Any, y: Any) -> None:
    """Raises where a stage changes the structure, shapes or dtypes of what passes through it."""
    asked, must = "pipeline.value_and_grad(stage_fn)", "a stage returns what it gets: same structure, shapes and dtypes"
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


def _facts(leaf: Any) -> tuple[Any, ...]:
    return leaf.shape, leaf.dtype, leaf.sharding
