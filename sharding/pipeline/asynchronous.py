"""Training by schedules that never flush: weights change while microbatches are under way.

A task works with the version of its stage's weights that the schedule gives it, forward and backward with the same
(weight stashing). A version is there from the update that makes it to the last task that uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..errors import ShardingError
from .executors.arguments import facts, mesh_in_force, single_controller, valid, whole_microbatches
from .executors.model import Ends, LossFn, Model, Remat, StageFn
from .executors.parts import Parts
from .executors.per_stage import Keys, Run, Worker, dispatch_order, workers
from .optimizer import States, Update, each_by_itself
from .schedule import Schedule
from .table import Located, Task

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
    """Training through a stretch of microbatches, by the weights that the schedule gives each task.

    After every ``microbatches_per_update`` of the schedule a stage's weights get the update by the mean of their
    gradients: w(t+1) = w(t) + update(gradient at the weights that these microbatches met), weights and state of the
    optimizer being the newest. With a synchronous schedule that is the plain step. The pipeline is empty at the
    beginning and at the end of a stretch.

    The function that comes back takes, outside of traces and in a single process:

    - params: as ``pipeline.value_and_grad`` does. ``"first"`` and ``"last"`` are updated with the first and the last
      stage. ``"shared"`` is updated with the first, by the sum of both ends' gradients; so both must have the same
      version for a microbatch, as in ``pipedream_2bw``, or ``pipedream`` with ``vertical_sync``.
    - opt_state: ``optimizer.init(params)``, or what a call before gave.
    - inputs, targets: pytrees with leaves [microbatches of the whole stretch, ...].

    It gives parameters and state after the stretch, and the losses [microbatches].

    Args:
        stage_fn: see ``pipeline.value_and_grad``.
        loss_fn: the same.
        schedule: of whole microbatches, each stage on one device; usually ``pipeline.schedules.pipedream``,
            ``pipedream_2bw`` or ``hetpipe``.
        optimizer: runs per stage, on its device. Each array is updated by itself; one of all stages is an array per
            stage, also where an optimizer takes its norm (LAMB).
        axis: of the mesh; as long as the schedule has devices.
        first_fn: see ``pipeline.value_and_grad``.
        last_fn: the same.
        remat: the same.

    Raises:
        ShardingError: before anything compiles: what ``pipeline.value_and_grad`` refuses; a schedule with slices, with
            a stage on several devices or stages that don't divide over them, or whose last update would lack
            microbatches; an optimizer that mixes arrays, such as ``clip_by_global_norm``; ``"shared"`` parameters of
            which the ends have different versions.

    References:
        Narayanan et al., PipeDream, SOSP 2019, section 3.3; Narayanan et al., Memory-Efficient Pipeline-Parallel DNN
        Training, ICML 2021 (2006.09503), section 3.1.
    """
    trainable(ASKED, schedule)
    model = Model(stage_fn=stage_fn, loss_fn=loss_fn, first_fn=first_fn, last_fn=last_fn, remat=remat)
    trainings: dict[Any, Training] = {}

    def run(params: Any, opt_state: Any, inputs: Any, targets: Any) -> tuple[Any, Any, jax.Array]:
        mesh = single_controller(ASKED, mesh_in_force(ASKED, schedule, axis))
        given = jax.tree.map(jnp.asarray, (params, opt_state, inputs, targets))
        key = mesh, jax.tree.structure(given), tuple(map(facts, jax.tree.leaves(given)))
        if key not in trainings:
            valid(ASKED, model, schedule, schedule.stages, params, [inputs], [targets])
            states = optimizer_states(ASKED, model, schedule, optimizer, params, opt_state)
            parts = Parts(mesh=mesh, axis=axis, schedule=schedule, rows=tuple(range(schedule.stages)))
            trainings[key] = Training(model, parts, optimizer, states, given[0], given[2])
        return trainings[key](*given)

    return run


class Training:
    """A stretch of a run over the devices of a mesh."""

    def __init__(
        self,
        model: Model,
        parts: Parts,
        optimizer: GradientTransformation,
        states: States,
        params: Any,
        inputs: Any,
    ):
        self.model, self.parts, self.optimizer, self.states = model, parts, optimizer, states
        self.order = dispatch_order(parts.schedule)
        self.workers = workers(model, parts, *model.parts(params), [inputs], microbatches=1)
        self.updates: dict[int, Update] = {}

    def __call__(self, params: Any, opt_state: Any, inputs: Any, targets: Any) -> tuple[Any, Any, jax.Array]:
        """Parameters, state and losses."""
        run = Stashing(self, params, opt_state, inputs, targets)
        for located in self.order:
            run.task(located)
        return run.results()


class Stashing(Run):
    """Tasks with versions of the weights, which a stage's updates make and its last use drops."""

    def __init__(self, training: Training, params: Any, opt_state: Any, inputs: Any, targets: Any):
        super().__init__(training.model, training.parts, training.workers, [inputs], [targets])
        self.training, self.like = training, (params, opt_state)
        self.schedule = training.parts.schedule
        self.states = training.states.cut(opt_state, self.parts)
        tasks = [task for order in self.schedule.orders for task in order]
        self.uses = Counter((task.stage, task.version) for task in tasks)
        self.left = Counter((task.stage, self.update_of(task)) for task in tasks if task.frees_activation)
        self.newest = dict.fromkeys(range(self.schedule.stages), 0)
        stages, ends = self.model.parts(params)
        self.shares = self.last > 0 and ends.shared is not None
        for (device, stage), row in self.parts.stages(stages).items():
            self.weights[stage, 0] = row
            self.ends[stage, 0] = self.parts.replica(ends_of(ends, stage, self.last), device)

    def update_of(self, task: Task) -> int:
        """The number of the update that a microbatch's gradient is for."""
        return task.microbatch // self.schedule.microbatches_per_update

    def keys(self, task: Task, device: int) -> Keys:
        """By stage, and version or update."""
        weights, sums = (task.stage, task.version), (task.stage, self.update_of(task))
        return Keys(weights=weights, ends=weights, sums=sums, end_sums=sums, loss=task.microbatch)

    def task(self, located: Located) -> None:
        """Starts a task, and the updates whose last gradient it makes."""
        task, device = located.task, located.device
        worker, keys = self.worker(device), self.keys(task, device)
        self.share(task, device)
        if keys.sums not in self.sums:
            self.sums[keys.sums] = worker.zeros(self.weights[keys.weights])
            self.end_sums[keys.end_sums] = worker.zeros(self.ends[keys.ends])
        if task.kind == "forward" and task.stage == self.last:
            self.losses[keys.loss] = self.parts.zero(device)
        super().task(located)
        self.uses[keys.weights] -= 1
        self.left[keys.sums] -= task.frees_activation
        while self.left.get((task.stage, self.newest[task.stage])) == 0:
            self.update(task.stage, device, worker)
        if task.version < self.newest[task.stage]:
            self.drop_unused(task.stage, task.version)

    def share(self, task: Task, device: int) -> None:
        """Brings the last stage what it shares with the first, in the version of its own weights."""
        at = task.stage, task.version
        if self.shares and task.stage == self.last and self.ends[at].shared is None:
            shared = self.parts.moved(self.ends[0, task.version].shared, device, self.parts.where(0)[0])
            self.ends[at] = self.ends[at]._replace(shared=shared)

    def update(self, stage: int, device: int, worker: Worker) -> None:
        """Makes the next version of a stage's weights."""
        old = self.newest[stage]
        new = self.newest[stage] = old + 1
        at = stage, old
        params, sums = self.piece(stage, old), self.summed(stage, old, device)
        if stage not in self.training.updates:
            per_update = self.schedule.microbatches_per_update
            self.training.updates[stage] = Update(self.training.optimizer, per_update, params, self.states[stage])
        last_use = old > 0 and not self.uses[at]  # what version 0 is made of is the caller's
        update = self.training.updates[stage]
        params, self.states[stage] = worker.run(
            lambda *args: update(*args, last_use=last_use), params, self.states[stage], sums
        )
        self.weights[stage, new], self.ends[stage, new] = self.model.parts(params)
        self.drop_unused(stage, old)

    def piece(self, stage: int, version: int) -> Any:
        """A stage's parameters in a version, in the form of all."""
        ends = self.ends[stage, version]
        own = ends._replace(shared=None) if stage > 0 else ends
        return self.model.whole(self.weights[stage, version], own, self.like[0])

    def summed(self, stage: int, update: int, device: int) -> Any:
        """The gradients of an update; the first stage has also the last one's for what they share."""
        at, other = (stage, update), (self.last, update)
        ends = self.end_sums.pop(at)
        if self.shares and stage == 0:
            moved = self.parts.moved(self.end_sums[other].shared, device, self.parts.where(self.last)[0])
            ends = self.worker(device).run(_added, ends, Ends(shared=moved))
            if self.newest[self.last] > update:
                del self.end_sums[other]
        if self.shares and stage == self.last:
            if self.newest[0] <= update:
                self.end_sums[at] = Ends(shared=ends.shared)  # until the first stage takes it
            ends = ends._replace(shared=None)
        return self.model.whole(self.sums.pop(at), ends, self.like[0])

    def drop_unused(self, stage: int, version: int) -> None:
        """Lets go of a version that is not the newest, unless a task is still to use it."""
        if not self.uses[stage, version]:
            self.weights.pop((stage, version), None)
            self.ends.pop((stage, version), None)

    def results(self) -> tuple[Any, Any, jax.Array]:
        """What the stretch ends with, put together again."""
        params, opt_state = self.like
        stages, ends = self.model.parts(params)
        rows = {at: self.weights[at[1], self.newest[at[1]]] for at in self.parts.places}
        first, last = self.ends[0, self.newest[0]], self.ends[self.last, self.newest[self.last]]
        found = self.parts.placed(Ends(first.first, last.last, first.shared), ends)
        params = self.model.whole(self.parts.joined(rows, stages), found, params)
        return params, self.training.states.joined(self.states, opt_state, self.parts), self.all_losses()

    def all_losses(self) -> jax.Array:
        """Those of the microbatches, in their order."""
        device = self.parts.where(self.last)[0]
        losses = [self.losses[number] for number in range(self.schedule.microbatches)]
        return self.parts.total({device: self.worker(device).run(jnp.stack, losses)})


def ends_of(ends: Ends, stage: int, last: int) -> Ends:
    """Those that are updated with a stage."""
    first = stage == 0
    return Ends(ends.first if first else None, ends.last if stage == last else None, ends.shared if first else None)


def trainable(asked: str, schedule: Schedule) -> None:
    """Raises where weights can't be trained by a schedule."""
    asked = f"{asked}(schedule={schedule.name!r})"
    schedule.check()
    whole_microbatches(asked, schedule)
    homes = Counter(stage for own in schedule.placement for stage in own)
    if several := [stage for stage, count in homes.items() if count > 1]:
        there = f"stage {several[0]} is on {homes[several[0]]} devices"
        raise ShardingError(asked, there=there, must="each stage's weights are on one device, which updates them")
    if rest := schedule.stages % schedule.devices:
        there = f"{schedule.stages} stages over {schedule.devices} devices: {rest} more than divide"
        raise ShardingError(asked, there=there, must="the stages' parameters are split evenly over the devices")
    if rest := schedule.microbatches % schedule.microbatches_per_update:
        there = (
            f"{schedule.microbatches} % {schedule.microbatches_per_update} = {rest} microbatches after the last update"
        )
        raise ShardingError(asked, there=there, must="microbatches are a multiple of those of an update")


def optimizer_states(
    asked: str, model: Model, schedule: Schedule, optimizer: GradientTransformation, params: Any, opt_state: Any
) -> States:
    """How an optimizer's state is cut into stages.

    Raises:
        ShardingError: an optimizer that can't run stage by stage, a state that isn't its own, or ends that share
            parameters in different versions.
    """
    stages, ends = model.parts(params)
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *jnp.shape(leaf)[1:]), jnp.result_type(leaf)), stages)
    last = schedule.stages - 1
    pieces = [model.whole(row, ends_of(ends, stage, last), params) for stage in range(schedule.stages)]
    if last > 0:
        each_by_itself(asked, optimizer, pieces[0])
    if ends.shared is not None:
        _one_version(asked, schedule)
    states = States.of(asked, optimizer, params, pieces)
    states.check(asked, opt_state)
    return states


def _one_version(asked: str, schedule: Schedule) -> None:
    """Raises where a microbatch meets different versions at both ends."""
    last = schedule.stages - 1
    found = {(task.stage, task.microbatch): task.version for order in schedule.orders for task in order}
    for number in range(schedule.microbatches):
        if found[0, number] != found[last, number]:
            raise ShardingError(
                f"{asked}: params/shared",
                there=f"microbatch {number} meets version {found[0, number]} at stage 0 and {found[last, number]} at"
                f" stage {last} in {schedule.name}",
                must="both ends use the same version of what they share",
                fix=["schedules.pipedream(..., vertical_sync=True)", "schedules.pipedream_2bw(...)", "'first', 'last'"],
            )


@jax.jit
def _added(ends: Ends, more: Ends) -> Ends:
    return ends._replace(shared=jax.tree.map(jnp.add, ends.shared, more.shared))
