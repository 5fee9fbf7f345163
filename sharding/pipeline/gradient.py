"""The loss of a pipelined model and its gradients, by any synchronous schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShardingError
from .executors.arguments import facts, leading, mesh_in_force, one_shape, single_controller, valid, whole_microbatches
from .executors.lockstep import device_stages
from .executors.model import LossFn, Model, Remat, StageFn
from .executors.one_program import one_program
from .executors.parts import Parts
from .executors.per_stage import Step
from .schedule import Schedule

ASKED = "pipeline.value_and_grad"

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
    context: Any = None,
    placed: bool = False,
    executor: Executor = "spmd",
) -> ValueAndGrad:
    """The loss and gradients of a model cut into stages along a mesh axis, equal to those of the model as a whole.

    The function that comes back takes:

    - params: one pytree with leaves [stages, ...], in the order of the model. Where ``first_fn`` or ``last_fn`` is
      given, a dict of ``"stages"``, that pytree, and ``"first"``, ``"last"`` and ``"shared"`` (what both use, such as a
      tied embedding), whatever there is of these.
    - inputs, targets: pytrees with leaves [microbatches, ...].

    Where the schedule cuts sequences (``schedules.terapipe``), inputs and targets are lists of such a pytree for each
    slice of the tokens, ``stage_fn`` gets and returns a context, and ``loss_fn`` gives a slice's share of the mean.

    Axes of the mesh other than ``axis`` are split as the arrays are and as annotations inside the functions say.

    Args:
        stage_fn: (one stage's parameters, x) -> y, of the same structure, shapes and dtypes as x. What is to reach
            later stages rides in x: a random key, or an auxiliary loss that ``loss_fn`` adds. With ``context``:
            (parameters, x, context) -> (y, the context of the next slice at this stage).
        loss_fn: (y of the last stage, or what ``last_fn`` makes of it, target) -> the mean loss over one microbatch;
            of slices the shares of it add up.
        schedule: synchronous: all of a step's gradients are of the same weights.
        axis: of the mesh; as long as the schedule has devices.
        first_fn: (params["first"], input) -> x; with ``"shared"`` a third argument. Run again in the backward.
        last_fn: (params["last"], y) -> output; with ``"shared"`` a third argument. Its backward follows at once.
        remat: whether a stage's forward is run again for its backward, which then keeps its input alone; a policy of
            ``jax.checkpoint`` says what else it keeps.
        context: what the first slice of a microbatch gets at every stage, such as keys and values of no tokens yet. Its
            gradient goes from each slice to the one before. In one program it has room for all tokens from the start;
            with ``"mpmd"`` slices may differ in length and the context may grow.
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
        part uses what the input part made. Li et al., TeraPipe, ICML 2021 (2102.07988), section 3.2 for slices.
    """
    _synchronous(schedule)
    if executor not in ("spmd", "mpmd"):
        raise ShardingError(f"{ASKED}(executor)", there=repr(executor), must="'spmd' or 'mpmd'")
    if context is None:
        whole_microbatches(f"{ASKED}(schedule={schedule.name!r})", schedule, fix="context=")
    else:
        context = jax.tree.map(jnp.asarray, context)
    model = Model(stage_fn=stage_fn, loss_fn=loss_fn, first_fn=first_fn, last_fn=last_fn, remat=remat, context=context)
    rows = _rows(schedule) if placed else tuple(range(schedule.stages))
    # Rows that don't divide over the devices lie on none of them alone: each gets its own, with copies, as if placed.
    is_even = len(rows) % schedule.devices == 0
    steps: dict[Any, Step] = {}

    def run(params: Any, inputs: Any, targets: Any) -> tuple[jax.Array, Any]:
        mesh = mesh_in_force(ASKED, schedule, axis)
        if context is None:
            inputs, targets = [inputs], [targets]
        if executor == "spmd":
            slices = valid(ASKED, model, schedule, len(rows), params, inputs, targets)
            one_shape(ASKED, model, slices)
            return one_program(model, schedule, axis=axis, rows=rows)(params, inputs, targets)
        real = single_controller(f"{ASKED}(executor='mpmd')", mesh, fix="executor='spmd'")
        given = params, inputs, targets = jax.tree.map(jnp.asarray, (params, inputs, targets))
        key = real, jax.tree.structure(given), tuple(map(facts, jax.tree.leaves(given)))
        if key not in steps:
            valid(ASKED, model, schedule, len(rows), *given)
        stages, ends = model.parts(params)
        if not is_even:
            stages = place(stages, schedule)
        if key not in steps:
            parts = Parts(mesh=real, axis=axis, schedule=schedule, rows=rows if is_even else _rows(schedule))
            steps[key] = Step(model, schedule, parts, stages, ends, inputs)
        loss, gradients, end_gradients = steps[key](stages, ends, inputs, targets)
        if not is_even:
            gradients = jax.tree.map(lambda leaf: leaf[_in_model_order(schedule)], gradients)
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
    leading(f"pipeline.place(stages, {schedule.name})", stages, schedule.stages, "stages")
    rows = np.array(_rows(schedule))
    return jax.tree.map(lambda leaf: leaf[rows], stages)


def _rows(schedule: Schedule) -> tuple[int, ...]:
    return tuple(stage for own in device_stages(schedule) for stage in own)


def _in_model_order(schedule: Schedule) -> np.ndarray:
    """Per stage one of the rows that ``place`` makes of it."""
    rows = _rows(schedule)
    return np.array([rows.index(stage) for stage in range(schedule.stages)])


def _synchronous(schedule: Schedule) -> None:
    asked = f"{ASKED}(schedule={schedule.name!r})"
    schedule.check()
    versions = {task.version for order in schedule.orders for task in order}
    if versions != {0} or schedule.microbatches_per_update != schedule.microbatches:
        raise ShardingError(
            asked,
            there=f"weights change after every {schedule.microbatches_per_update} of {schedule.microbatches}"
            " microbatches",
            must="all gradients of a step are of the same weights",
            fix=["a synchronous schedule, such as pipeline.schedules.one_f_one_b", "pipeline.train_async"],
        )
