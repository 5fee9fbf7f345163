"""Loss and gradients of a pipelined model under any synchronous schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShardingError
from .executors.input_checks import (
    check_equal_slices,
    check_inputs,
    check_leading_dim,
    check_unsliced,
    current_mesh,
    signature,
    single_controller,
)
from .executors.mpmd_executor import PipelineStep
from .executors.pipelined_model import LossFn, Model, Remat, StageFn
from .executors.spmd_executor import one_program
from .executors.stage_meshes import StageMeshes
from .executors.tick_tables import device_stages
from .placed_stages import PlacedStages, unplaced
from .schedule import Schedule

ASKED = "pipeline.value_and_grad"

Executor = Literal["spmd", "mpmd"]
ValueAndGrad = Callable[[Any, Any, Any], tuple[jax.Array, Any]]
"""params, inputs, targets -> the mean loss over all microbatches, and its gradients in the structure of params."""


def value_and_grad(
    stage_fn: StageFn,
    loss_fn: LossFn,
    schedule: Schedule,
    *,
    axis: str = "pipe",
    first_fn: Callable[..., Any] | None = None,
    last_fn: Callable[..., Any] | None = None,
    remat: Remat = None,
    context: Any = None,
    placed: bool = False,
    executor: Executor = "spmd",
) -> ValueAndGrad:
    """Loss and gradients of a model whose stages are sharded over a mesh axis, equal to those without a pipeline.

    The returned function takes:

    - params: a pytree with leaves [stages, ...] in model order. With ``first_fn`` or ``last_fn``, a dict of
      ``"stages"``, that pytree, and any of ``"first"``, ``"last"`` and ``"shared"`` (parameters of both, such as a tied
      embedding).
    - inputs, targets: pytrees with leaves [microbatches, ...].

    With a schedule that slices sequences (``schedules.terapipe``), inputs and targets are lists with one such pytree
    per slice, ``stage_fn`` takes and returns a context, and ``loss_fn`` returns a slice's share of the mean.

    Other mesh axes shard as the arrays and the annotations inside the functions specify.

    Args:
        stage_fn: (one stage's parameters, x) -> y, with y of the structure, shapes and dtypes of x. Values for later
            stages are carried in x: a PRNG key, or an auxiliary loss that ``loss_fn`` adds. With ``context``:
            (parameters, x, context) -> (y, the context of the next slice at this stage).
        loss_fn: (y of the last stage or, with ``last_fn``, its output, target) -> the mean loss over one microbatch;
            the losses of a microbatch's slices are summed.
        schedule: synchronous: all gradients of a step use the same weights.
        axis: mesh axis, of the size of the schedule's number of devices.
        first_fn: (params["first"], input) -> x; with ``"shared"`` as third argument. Rematerialized in the backward.
        last_fn: (params["last"], y) -> output; with ``"shared"`` as third argument. Its backward follows immediately.
        remat: whether to rematerialize a stage's forward in its backward, which then saves only its input; or a
            ``jax.checkpoint`` policy.
        context: initial context of a microbatch's first slice at every stage, such as empty keys and values. Its
            gradient is passed from each slice to the previous one. In one program its size is fixed, and large enough
            for all tokens; with ``"mpmd"`` slices may differ in length and the context may grow.
        placed: whether the stages' parameters, and so their gradients, come from ``place``, in device order.
        executor: ``"spmd"``: one XLA program in lockstep, for use inside ``sharding.jit`` or ``jax.jit``. ``"mpmd"``:
            one program per task and device, each dispatched as early as possible; called outside of traces, by a
            single process.
    Raises:
        ShardingError: before compilation: a schedule that cannot run or is asynchronous; a missing mesh axis; a wrong
            number of devices, stages or microbatches; stages in another order; a stage that changes the shape of x.

    References:
        Narayanan et al., PipeDream-2BW, ICML 2021 (2006.09503), section 2 (PipeDream-Flush); Qi et al., Zero Bubble
        Pipeline Parallelism, ICLR 2024 (2401.10241), section 2 for split backwards. As there, backward-weight reuses
        the intermediates of backward-input. Li et al., TeraPipe, ICML 2021 (2102.07988), section 3.2 for slices.
    """
    _check_synchronous(schedule)
    if executor not in ("spmd", "mpmd"):
        raise ShardingError(f"{ASKED}(executor)", found=repr(executor), required="'spmd' or 'mpmd'")
    if context is None:
        check_unsliced(f"{ASKED}(schedule={schedule.name!r})", schedule, fix="context=")
    else:
        context = jax.tree.map(jnp.asarray, context)
    model = Model(stage_fn=stage_fn, loss_fn=loss_fn, first_fn=first_fn, last_fn=last_fn, remat=remat, context=context)
    rows = _device_order(schedule) if placed else tuple(range(schedule.stages))
    # If the stages are not divisible by the devices, gather the parameters in device order, as `place` does.
    is_even = len(rows) % schedule.devices == 0
    steps: dict[Any, PipelineStep] = {}

    def run(params: Any, inputs: Any, targets: Any) -> tuple[jax.Array, Any]:
        params, is_placed = _in_order(model, params, rows, placed=placed)
        loss, gradients = in_order(params, inputs, targets)
        return loss, _as_placed(model, gradients, rows) if is_placed else gradients

    def in_order(params: Any, inputs: Any, targets: Any) -> tuple[jax.Array, Any]:
        mesh = current_mesh(ASKED, schedule, axis)
        if context is None:
            inputs, targets = [inputs], [targets]
        if executor == "spmd":
            slices = check_inputs(ASKED, model, schedule, len(rows), params, inputs, targets)
            check_equal_slices(ASKED, model, slices)
            return one_program(model, schedule, axis=axis, rows=rows)(params, inputs, targets)
        concrete_mesh = single_controller(f"{ASKED}(executor='mpmd')", mesh, fix="executor='spmd'")
        given = params, inputs, targets = jax.tree.map(jnp.asarray, (params, inputs, targets))
        key = concrete_mesh, jax.tree.structure(given), tuple(map(signature, jax.tree.leaves(given)))
        if key not in steps:
            check_inputs(ASKED, model, schedule, len(rows), *given)
        stages, ends = model.partition(params)
        if not is_even:
            stages = place(stages, schedule).stages
        if key not in steps:
            stage_meshes = StageMeshes(
                mesh=concrete_mesh, axis=axis, schedule=schedule, rows=rows if is_even else _device_order(schedule)
            )
            steps[key] = PipelineStep(model, schedule, stage_meshes, stages, ends, inputs)
        loss, gradients, end_gradients = steps[key](stages, ends, inputs, targets)
        if not is_even:
            gradients = jax.tree.map(lambda leaf: leaf[_in_model_order(schedule)], gradients)
        return loss, model.combine(gradients, end_gradients, params)

    return run


def place(stages: Any, schedule: Schedule) -> PlacedStages:
    """The stages' parameters in device order, for ``value_and_grad(placed=True)``: avoids resharding them in each step.

    Call it once, for schedules whose device order is not the model order: several chunks per device, or a V. A stage on
    two devices (Chimera) is copied to both, and both copies get the sum of the gradients.

    Args:
        stages: a pytree with leaves [stages, ...] in model order.
        schedule: whose placement to use.

    Returns:
        `.stages` is the pytree with leaves [devices x stages per device, ...]. Only ``placed=True`` takes it, and
        returns the gradients likewise.
    """
    check_leading_dim(f"pipeline.place(stages, {schedule.name})", stages, schedule.stages, "stages")
    order = _device_order(schedule)
    return PlacedStages(jax.tree.map(lambda leaf: leaf[np.array(order)], stages), order)


def _in_order(model: Model, params: Any, rows: Sequence[int], *, placed: bool) -> tuple[Any, bool]:
    """The parameters, without the mark that their stages are in device order, and whether they had one."""
    given = params.get("stages") if model.has_ends and isinstance(params, Mapping) else params
    stages = unplaced(ASKED, given, rows, placed=placed)
    if stages is given:
        return params, False
    return {**params, "stages": stages} if model.has_ends else stages, True


def _as_placed(model: Model, gradients: Any, rows: Sequence[int]) -> Any:
    if not model.has_ends:
        return PlacedStages(gradients, tuple(rows))
    return {**gradients, "stages": PlacedStages(gradients["stages"], tuple(rows))}


def _device_order(schedule: Schedule) -> tuple[int, ...]:
    return tuple(stage for own in device_stages(schedule) for stage in own)


def _in_model_order(schedule: Schedule) -> np.ndarray:
    """Per stage, one of its rows in device order."""
    rows = _device_order(schedule)
    return np.array([rows.index(stage) for stage in range(schedule.stages)])


def _check_synchronous(schedule: Schedule) -> None:
    asked = f"{ASKED}(schedule={schedule.name!r})"
    schedule.check()
    versions = {task.version for order in schedule.orders for task in order}
    if versions != {0} or schedule.microbatches_per_update != schedule.microbatches:
        raise ShardingError(
            asked,
            found=f"an update after every {schedule.microbatches_per_update} of {schedule.microbatches} microbatches",
            required="a synchronous schedule: all gradients of a step use the same weights",
            fix=["a schedule such as pipeline.schedules.one_f_one_b", "pipeline.train_async"],
        )
