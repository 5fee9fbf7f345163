"""Training with asynchronous schedules (PipeDream, PipeDream-2BW, HetPipe): weight stashing without flushes.

A task uses the version of its stage's weights that the schedule assigns, in the forward and in the backward. A version
is kept from the update that creates it to its last use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..errors import ShardingError
from .executors.input_checks import check_inputs, check_unsliced, current_mesh, signature, single_controller
from .executors.mpmd_executor import BufferKeys, DevicePrograms, ScheduleRun, dispatch_order, trace_programs
from .executors.pipelined_model import Ends, LossFn, Model, Remat, StageFn
from .executors.stage_meshes import StageMeshes
from .schedule import Schedule
from .stage_optimizer import StageStates, Update, check_independent_updates
from .task_table import Located, Task

if TYPE_CHECKING:
    from optax import GradientTransformation

ASKED = "pipeline.train_async"

Train = Callable[[Any, Any, Any, Any], tuple[Any, Any, jax.Array]]
"""params, opt_state, inputs, targets -> params, opt_state, the loss of each microbatch."""


def train_async(
    stage_fn: StageFn,
    loss_fn: LossFn,
    schedule: Schedule,
    optimizer: GradientTransformation,
    *,
    axis: str = "pipe",
    first_fn: Callable[..., Any] | None = None,
    last_fn: Callable[..., Any] | None = None,
    remat: Remat = None,
) -> Train:
    """Trains on a run of microbatches with the weight versions of the schedule.

    After every ``microbatches_per_update`` microbatches a stage updates its weights with the mean of their gradients:
    w(t+1) = w(t) + update(gradient at the stashed weights of these microbatches), where the optimizer gets the newest
    weights and state. With a synchronous schedule this is an ordinary step. The pipeline fills at the start of the run
    and drains at its end.

    The returned function takes, outside of traces and in a single process:

    - params: as ``pipeline.value_and_grad``. ``"first"`` and ``"last"`` are updated with the first and the last stage.
      ``"shared"`` is updated with the first, by the sum of both ends' gradients; so both must use the same version for
      a microbatch, as in ``pipedream_2bw``, or ``pipedream`` with ``vertical_sync``.
    - opt_state: ``optimizer.init(params)``, or the state from a previous call.
    - inputs, targets: pytrees with leaves [microbatches, ...].

    It returns the final parameters and state, and the losses [microbatches].

    Args:
        stage_fn: see ``pipeline.value_and_grad``.
        loss_fn: see ``pipeline.value_and_grad``.
        schedule: without slices, each stage on one device; usually ``pipeline.schedules.pipedream``, ``pipedream_2bw``
            or ``hetpipe``.
        optimizer: runs per stage, on the stage's devices. Must update arrays independently; a stacked array counts as
            one array per stage, also where an optimizer computes a norm per array (LAMB).
        axis: mesh axis, of the size of the schedule's number of devices.
        first_fn: see ``pipeline.value_and_grad``.
        last_fn: see ``pipeline.value_and_grad``.
        remat: see ``pipeline.value_and_grad``.

    Raises:
        ShardingError: before compilation: as ``pipeline.value_and_grad``; a schedule with slices, with a stage on
            several devices, with a number of stages not divisible by that of devices, or with too few microbatches for
            its last update; an optimizer that mixes arrays, such as ``clip_by_global_norm``; ``"shared"`` parameters in
            different versions at the two ends.

    References:
        Narayanan et al., PipeDream, SOSP 2019, section 3.3; Narayanan et al., Memory-Efficient Pipeline-Parallel DNN
        Training, ICML 2021 (2006.09503), section 3.1.
    """
    check_trainable(ASKED, schedule)
    model = Model(stage_fn=stage_fn, loss_fn=loss_fn, first_fn=first_fn, last_fn=last_fn, remat=remat)
    trainings: dict[Any, AsyncTraining] = {}

    def run(params: Any, opt_state: Any, inputs: Any, targets: Any) -> tuple[Any, Any, jax.Array]:
        mesh = single_controller(ASKED, current_mesh(ASKED, schedule, axis))
        given = jax.tree.map(jnp.asarray, (params, opt_state, inputs, targets))
        key = mesh, jax.tree.structure(given), tuple(map(signature, jax.tree.leaves(given)))
        if key not in trainings:
            check_inputs(ASKED, model, schedule, schedule.stages, params, [inputs], [targets])
            states = optimizer_states(ASKED, model, schedule, optimizer, params, opt_state)
            stage_meshes = StageMeshes(mesh=mesh, axis=axis, schedule=schedule, rows=tuple(range(schedule.stages)))
            trainings[key] = AsyncTraining(model, stage_meshes, optimizer, states, given[0], given[2])
        return trainings[key](*given)

    return run


class AsyncTraining:
    """Executes training runs on the devices of a mesh."""

    def __init__(
        self,
        model: Model,
        stage_meshes: StageMeshes,
        optimizer: GradientTransformation,
        states: StageStates,
        params: Any,
        inputs: Any,
    ):
        self.model, self.stage_meshes, self.optimizer, self.states = model, stage_meshes, optimizer, states
        self.order = dispatch_order(stage_meshes.schedule)
        self.program_table = trace_programs(model, stage_meshes, *model.partition(params), [inputs], microbatches=1)
        self.updates: dict[int, Update] = {}

    def __call__(self, params: Any, opt_state: Any, inputs: Any, targets: Any) -> tuple[Any, Any, jax.Array]:
        """Returns parameters, state and losses."""
        run = StashingRun(self, params, opt_state, inputs, targets)
        for located in self.order:
            run.dispatch(located)
        return run.results()


class StashingRun(ScheduleRun):
    """One run: updates create versions of the weights, and their last use frees them."""

    def __init__(self, training: AsyncTraining, params: Any, opt_state: Any, inputs: Any, targets: Any):
        super().__init__(training.model, training.stage_meshes, training.program_table, [inputs], [targets])
        self.training, self.like = training, (params, opt_state)
        self.schedule = training.stage_meshes.schedule
        self.states = training.states.per_stage(opt_state, self.stage_meshes)
        tasks = [task for order in self.schedule.orders for task in order]
        self.uses = Counter((task.stage, task.version) for task in tasks)
        self.left = Counter((task.stage, self.update_index(task)) for task in tasks if task.frees_activation)
        self.newest = dict.fromkeys(range(self.schedule.stages), 0)
        stages, ends = self.model.partition(params)
        self.shares = self.last > 0 and ends.shared is not None
        for (device, stage), row in self.stage_meshes.stage_params(stages).items():
            self.weights[stage, 0] = row
            self.ends[stage, 0] = self.stage_meshes.local_replica(stage_ends(ends, stage, self.last), device)

    def update_index(self, task: Task) -> int:
        """The index of the update to which a microbatch's gradient contributes."""
        return task.microbatch // self.schedule.microbatches_per_update

    def buffer_keys(self, task: Task, device: int) -> BufferKeys:
        """By stage, and version or update."""
        weights, sums = (task.stage, task.version), (task.stage, self.update_index(task))
        return BufferKeys(weights=weights, ends=weights, sums=sums, end_sums=sums, loss=task.microbatch)

    def dispatch(self, located: Located) -> None:
        """Dispatches a task, and the updates whose gradients it completes."""
        task, device = located.task, located.device
        programs, keys = self.programs(device), self.buffer_keys(task, device)
        self.copy_shared(task, device)
        if keys.sums not in self.sums:
            self.sums[keys.sums] = programs.zeros(self.weights[keys.weights])
            self.end_sums[keys.end_sums] = programs.zeros(self.ends[keys.ends])
        if task.kind == "forward" and task.stage == self.last:
            self.losses[keys.loss] = self.stage_meshes.zero(device)
        super().dispatch(located)
        self.uses[keys.weights] -= 1
        self.left[keys.sums] -= task.frees_activation
        while self.left.get((task.stage, self.newest[task.stage])) == 0:
            self.update(task.stage, device, programs)
        if task.version < self.newest[task.stage]:
            self.free_unused(task.stage, task.version)

    def copy_shared(self, task: Task, device: int) -> None:
        """Copies the shared parameters to the last stage, in the version of its own weights."""
        at = task.stage, task.version
        if self.shares and task.stage == self.last and self.ends[at].shared is None:
            shared = self.stage_meshes.transfer(
                self.ends[0, task.version].shared, device, self.stage_meshes.devices_of(0)[0]
            )
            self.ends[at] = self.ends[at]._replace(shared=shared)

    def update(self, stage: int, device: int, programs: DevicePrograms) -> None:
        """Creates the next version of a stage's weights."""
        old = self.newest[stage]
        new = self.newest[stage] = old + 1
        at = stage, old
        params, sums = self.stage_params(stage, old), self.gradient_sums(stage, old, device)
        if stage not in self.training.updates:
            per_update = self.schedule.microbatches_per_update
            self.training.updates[stage] = Update(self.training.optimizer, per_update, params, self.states[stage])
        last_use = old > 0 and not self.uses[at]  # version 0 belongs to the caller
        update = self.training.updates[stage]
        params, self.states[stage] = programs.run(
            lambda *args: update(*args, last_use=last_use), params, self.states[stage], sums
        )
        self.weights[stage, new], self.ends[stage, new] = self.model.partition(params)
        self.free_unused(stage, old)

    def stage_params(self, stage: int, version: int) -> Any:
        """A stage's parameters in a version, in the structure of params."""
        ends = self.ends[stage, version]
        own = ends._replace(shared=None) if stage > 0 else ends
        return self.model.combine(self.weights[stage, version], own, self.like[0])

    def gradient_sums(self, stage: int, update: int, device: int) -> Any:
        """The gradient sums of an update; the first stage adds the last one's for the shared parameters."""
        at, other = (stage, update), (self.last, update)
        ends = self.end_sums.pop(at)
        if self.shares and stage == 0:
            moved = self.stage_meshes.transfer(
                self.end_sums[other].shared, device, self.stage_meshes.devices_of(self.last)[0]
            )
            ends = self.programs(device).run(_added, ends, Ends(shared=moved))
            if self.newest[self.last] > update:
                del self.end_sums[other]
        if self.shares and stage == self.last:
            if self.newest[0] <= update:
                self.end_sums[at] = Ends(shared=ends.shared)  # until the first stage adds it
            ends = ends._replace(shared=None)
        return self.model.combine(self.sums.pop(at), ends, self.like[0])

    def free_unused(self, stage: int, version: int) -> None:
        """Frees a version that is not the newest, unless a later task uses it."""
        if not self.uses[stage, version]:
            self.weights.pop((stage, version), None)
            self.ends.pop((stage, version), None)

    def results(self) -> tuple[Any, Any, jax.Array]:
        """The final parameters, state and losses."""
        params, opt_state = self.like
        stages, ends = self.model.partition(params)
        rows = {at: self.weights[at[1], self.newest[at[1]]] for at in self.stage_meshes.placements}
        first, last = self.ends[0, self.newest[0]], self.ends[self.last, self.newest[self.last]]
        found = self.stage_meshes.put_global(Ends(first.first, last.last, first.shared), ends)
        params = self.model.combine(self.stage_meshes.stack_stages(rows, stages), found, params)
        return params, self.training.states.combine(self.states, opt_state, self.stage_meshes), self.all_losses()

    def all_losses(self) -> jax.Array:
        """The losses in order of microbatches."""
        device = self.stage_meshes.devices_of(self.last)[0]
        losses = [self.losses[number] for number in range(self.schedule.microbatches)]
        return self.stage_meshes.total_loss({device: self.programs(device).run(jnp.stack, losses)})


def stage_ends(ends: Ends, stage: int, last: int) -> Ends:
    """The end parameters that are updated with a stage."""
    first = stage == 0
    return Ends(ends.first if first else None, ends.last if stage == last else None, ends.shared if first else None)


def check_trainable(asked: str, schedule: Schedule) -> None:
    """Raises if a schedule cannot be used for training."""
    asked = f"{asked}(schedule={schedule.name!r})"
    schedule.check()
    check_unsliced(asked, schedule)
    num_devices = Counter(stage for own in schedule.placement for stage in own)
    if several := [stage for stage, count in num_devices.items() if count > 1]:
        there = f"stage {several[0]} is on {num_devices[several[0]]} devices"
        raise ShardingError(asked, found=there, required="each stage on one device, which updates its weights")
    if rest := schedule.stages % schedule.devices:
        there = f"{schedule.stages} stages % {schedule.devices} devices = {rest}"
        raise ShardingError(asked, found=there, required="a number of stages divisible by the number of devices")
    if rest := schedule.microbatches % schedule.microbatches_per_update:
        there = (
            f"{schedule.microbatches} % {schedule.microbatches_per_update} = {rest} microbatches after the last update"
        )
        raise ShardingError(asked, found=there, required="a multiple of the microbatches per update")


def optimizer_states(
    asked: str, model: Model, schedule: Schedule, optimizer: GradientTransformation, params: Any, opt_state: Any
) -> StageStates:
    """The mapping of the optimizer's state to stages.

    Raises:
        ShardingError: an optimizer that cannot run per stage, a state that is not the optimizer's, or parameters shared
            by both ends in different versions.
    """
    stages, ends = model.partition(params)
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *jnp.shape(leaf)[1:]), jnp.result_type(leaf)), stages)
    last = schedule.stages - 1
    pieces = [model.combine(row, stage_ends(ends, stage, last), params) for stage in range(schedule.stages)]
    if last > 0:
        check_independent_updates(asked, optimizer, pieces[0])
    if ends.shared is not None:
        _check_shared_versions(asked, schedule)
    states = StageStates.of(asked, optimizer, params, pieces)
    states.check(asked, opt_state)
    return states


def _check_shared_versions(asked: str, schedule: Schedule) -> None:
    """Raises if a microbatch uses different versions at the two ends."""
    last = schedule.stages - 1
    found = {(task.stage, task.microbatch): task.version for order in schedule.orders for task in order}
    for number in range(schedule.microbatches):
        if found[0, number] != found[last, number]:
            raise ShardingError(
                f"{asked}: params/shared",
                found=f"microbatch {number} uses version {found[0, number]} at stage 0 and {found[last, number]} at"
                f" stage {last} in {schedule.name}",
                required="the same version of shared parameters at both ends",
                fix=["schedules.pipedream(..., vertical_sync=True)", "schedules.pipedream_2bw(...)", "'first', 'last'"],
            )


@jax.jit
def _added(ends: Ends, more: Ends) -> Ends:
    return ends._replace(shared=jax.tree.map(jnp.add, ends.shared, more.shared))
