"""Training with several pipelines and a parameter server, in waves (see ``waves``).

The server keeps the global weights per stage on the first worker's devices. It applies waves in the order of their
pushes, and keeps each version until the last worker has pulled it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..errors import ShardingError
from ..spec import sizes_text
from .asynchronous_training import Train, optimizer_states, stage_ends
from .executors.input_checks import check_inputs, check_leading_dim, current_mesh, signature, single_controller
from .executors.mpmd_executor import BufferKeys, DevicePrograms, ProgramTable, ScheduleRun, trace_programs
from .executors.pipelined_model import Ends, LossFn, Model, Remat, StageFn
from .executors.stage_meshes import StageMeshes
from .stage_optimizer import StageStates, Update, apply_updates
from .task_table import Located, Task
from .waves import Push, Waves, WaveSimulation

if TYPE_CHECKING:
    from optax import GradientTransformation

ASKED = "pipeline.train_waves"


def train_waves(
    stage_fn: StageFn,
    loss_fn: LossFn,
    waves: Waves,
    optimizer: GradientTransformation,
    *,
    axis: str = "pipe",
    workers_axis: str = "data",
    first_fn: Callable[..., Any] | None = None,
    last_fn: Callable[..., Any] | None = None,
    remat: Remat = None,
) -> Train:
    """Trains with several pipelines that push and pull the sums of their updates in waves (wave synchronous parallel).

    At every stage a minibatch uses the weights that its worker had on admission: the global weights at its last pull,
    and its own updates since. ``waves.simulate()`` determines when, in simulated time, so that runs are reproducible.
    The optimizer gets the weights that the minibatch used; each worker has its own state.

    The returned function takes, outside of traces and in a single process:

    - params: common to all workers, as in ``pipeline.value_and_grad``; without ``"shared"``.
    - opt_state: a tuple of each worker's optimizer state, initially ``(optimizer.init(params),) * workers``.
    - inputs, targets: pytrees with leaves [workers, microbatches, ...].

    It returns the parameters with all workers' waves applied, the states, and the losses [workers, microbatches].

    Args:
        stage_fn: see ``pipeline.value_and_grad``.
        loss_fn: see ``pipeline.value_and_grad``.
        waves: number of workers, their speeds and their clock distance.
        optimizer: see ``pipeline.train_async``.
        axis: mesh axis, of the size of the number of stages.
        workers_axis: mesh axis, of the size of the number of workers.
        first_fn: see ``pipeline.value_and_grad``.
        last_fn: see ``pipeline.value_and_grad``.
        remat: see ``pipeline.value_and_grad``.

    Raises:
        ShardingError: before compilation: as ``pipeline.train_async``; a missing workers axis, or one of another size;
            ``"shared"`` parameters.

    References:
        Park et al., HetPipe, USENIX ATC 2020, sections 4 and 5. There the parameter server runs on the hosts.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import sharding
        >>> from sharding import pipeline
        >>> def loss_fn(y, target):
        ...     return jnp.mean((y - target) ** 2)
        >>> waves, optimizer = pipeline.Waves(stages=2, microbatches=4, speeds=(1.0, 0.5)), optax.sgd(0.1)
        >>> train = pipeline.train_waves(lambda weight, x: x * weight, loss_fn, waves, optimizer)
        >>> weights, data = jnp.ones(2), jnp.ones((2, 4, 8))
        >>> with sharding.mesh(data=2, pipe=2, devices=jax.devices()[:4]):
        ...     weights, states, losses = train(weights, (optimizer.init(weights),) * 2, data, 2 * data)
        >>> losses.shape
        (2, 4)
    """
    model = Model(stage_fn=stage_fn, loss_fn=loss_fn, first_fn=first_fn, last_fn=last_fn, remat=remat)
    simulated = waves.simulate()
    trainings: dict[Any, WaveTraining] = {}

    def run(params: Any, opt_state: Any, inputs: Any, targets: Any) -> tuple[Any, Any, jax.Array]:
        mesh = single_controller(ASKED, current_mesh(ASKED, waves.schedule, axis))
        _check_arguments(model, waves, mesh, workers_axis, params, opt_state, inputs, targets)
        given = jax.tree.map(jnp.asarray, (params, tuple(opt_state), inputs, targets))
        key = mesh, jax.tree.structure(given), tuple(map(signature, jax.tree.leaves(given)))
        if key not in trainings:
            states = [optimizer_states(ASKED, model, waves.schedule, optimizer, params, state) for state in opt_state]
            outer = StageMeshes(mesh=mesh, axis=workers_axis, schedule=waves.schedule, rows=tuple(range(waves.workers)))
            trainings[key] = WaveTraining(model, simulated, outer, axis, optimizer, states[0])
        return trainings[key](*given)

    return run


class WaveTraining:
    """Executes training runs on the devices of a mesh with an axis for the workers."""

    def __init__(
        self,
        model: Model,
        simulated: WaveSimulation,
        outer: StageMeshes,
        axis: str,
        optimizer: GradientTransformation,
        states: StageStates,
    ):
        self.model, self.simulated, self.outer, self.optimizer, self.states = model, simulated, outer, optimizer, states
        rows = tuple(range(outer.schedule.stages))
        self.stage_meshes = [
            StageMeshes(mesh=mesh, axis=axis, schedule=outer.schedule, rows=rows) for mesh in outer.meshes
        ]
        self.order = _dispatch_order(simulated)
        self.program_tables: list[ProgramTable] = []
        self.updates: dict[tuple[int, int], Update] = {}

    def __call__(self, params: Any, opt_state: Any, inputs: Any, targets: Any) -> tuple[Any, Any, jax.Array]:
        """Returns parameters, states and losses."""
        runs = []
        server = ParameterServer(self.model, self.stage_meshes[0], self.simulated, self.outer.local_replica(params, 0))
        data = zip(self.outer.unstack(inputs), self.outer.unstack(targets), strict=True)
        for number, (x, target) in enumerate(data):
            own = self.outer.local_replica(params, number)
            if len(self.program_tables) == number:
                self.program_tables.append(
                    trace_programs(
                        self.model, self.stage_meshes[number], *self.model.partition(own), [x], microbatches=1
                    )
                )
            runs.append(WorkerRun(self, number, server, own, opt_state[number], x, target))
        for number, located in self.order:
            runs[number].dispatch(located)
        mesh = self.outer.mesh
        losses = [self.outer.put_global(run.all_losses(), jnp.zeros(())) for run in runs]
        states = tuple(
            self.states.combine(run.states, like, stage_meshes)
            for run, like, stage_meshes in zip(runs, opt_state, self.stage_meshes, strict=True)
        )
        with jax.set_mesh(mesh):
            return self.outer.put_global(server.result(), params), states, jnp.stack(losses)


class ParameterServer:
    """The global weights, by stage and number of pushes, on the first worker's devices."""

    def __init__(self, model: Model, stage_meshes: StageMeshes, simulated: WaveSimulation, params: Any):
        self.model, self.stage_meshes, self.like, self.pushes = model, stage_meshes, params, simulated.pushes
        self.versions = params_by_stage(model, stage_meshes, params)
        self.newest = dict.fromkeys(range(stage_meshes.schedule.stages), 0)
        self.pending: dict[tuple[int, Push], Any] = {}
        pulls = [pushed for pulls in simulated.pulls for pushed in pulls.values()]
        self.uses = Counter((stage, pushed) for pushed in pulls for stage in self.newest)

    def push(self, stage: int, wave: Push, total: Any, stage_meshes: StageMeshes) -> None:
        """Applies the update sum of a wave, after all earlier pushes."""
        device = self.stage_meshes.devices_of(stage)[0]
        self.pending[stage, wave] = total if stage_meshes is self.stage_meshes else self.stage_meshes.put(total, device)
        while (old := self.newest[stage]) < len(self.pushes) and (stage, self.pushes[old]) in self.pending:
            more = self.pending.pop((stage, self.pushes[old]))
            with jax.set_mesh(self.stage_meshes.meshes[device]):
                self.versions[stage, old + 1] = _apply_updates(self.versions[stage, old], more)
            self.newest[stage] = old + 1
            self.free_unused(stage, old)

    def pull(self, stage: int, pushed: int, stage_meshes: StageMeshes) -> Any:
        """A stage's weights after `pushed` pushes, on the devices of a worker."""
        found = self.versions[stage, pushed]
        self.uses[stage, pushed] -= 1
        if pushed < self.newest[stage]:
            self.free_unused(stage, pushed)
        return (
            found if stage_meshes is self.stage_meshes else stage_meshes.put(found, stage_meshes.devices_of(stage)[0])
        )

    def free_unused(self, stage: int, pushed: int) -> None:
        """Frees weights that are not the newest, unless a later pull needs them."""
        if not self.uses[stage, pushed]:
            del self.versions[stage, pushed]

    def result(self) -> Any:
        """The newest parameters of all stages, combined."""
        return combine_stages(
            self.model, self.stage_meshes, self.like, {s: self.versions[s, new] for s, new in self.newest.items()}
        )


class WorkerRun(ScheduleRun):
    """The tasks of one worker; its weight versions are its last pull plus its own updates since."""

    def __init__(
        self,
        training: WaveTraining,
        number: int,
        server: ParameterServer,
        params: Any,
        state: Any,
        inputs: Any,
        targets: Any,
    ):
        super().__init__(
            training.model, training.stage_meshes[number], training.program_tables[number], [inputs], [targets]
        )
        self.training, self.number, self.server, self.like = training, number, server, params
        self.states = training.states.per_stage(state, self.stage_meshes)
        waves = training.simulated.waves
        self.wave = waves.wave
        pulls = training.simulated.pulls[number]
        self.pulls = {microbatch - (waves.wave - 1): pushed for microbatch, pushed in pulls.items()}
        self.newest = max(task.version for order in waves.schedule.orders for task in order)
        self.uses = Counter((task.stage, task.version) for order in waves.schedule.orders for task in order)
        for stage in range(waves.stages):  # creating a version from the previous one is a use as well
            self.uses.update((stage, made - 1) for made in range(1, self.newest + 1) if made not in self.pulls)
        self.local_updates: dict[tuple[int, int], Any] = {}
        self.wave_sums: dict[tuple[int, int], Any] = {}
        for (stage, _), own in params_by_stage(self.model, self.stage_meshes, params).items():
            self.store(stage, 0, own)

    def buffer_keys(self, task: Task, device: int) -> BufferKeys:
        """By stage, and version or microbatch."""
        weights, sums = (task.stage, task.version), (task.stage, task.microbatch)
        return BufferKeys(weights=weights, ends=weights, sums=sums, end_sums=sums, loss=task.microbatch)

    def dispatch(self, located: Located) -> None:
        """Dispatches a task; creates its weights before, and applies the update that it completes after."""
        task, device = located.task, located.device
        programs, keys = self.programs(device), self.buffer_keys(task, device)
        if task.kind == "forward":
            self.create_weights(task.stage, task.version, programs)
            self.sums[keys.sums] = programs.zeros(self.weights[keys.weights])
            self.end_sums[keys.end_sums] = programs.zeros(self.ends[keys.ends])
            if task.stage == self.last:
                self.losses[keys.loss] = self.stage_meshes.zero(device)
        super().dispatch(located)
        if task.frees_activation:
            self.update(task, keys, programs)
        self.release(task.stage, task.version)

    def create_weights(self, stage: int, version: int, programs: DevicePrograms) -> None:
        """Creates the weights with `version` of this worker's updates."""
        if (stage, version) in self.weights:
            return
        if version in self.pulls:
            params = self.server.pull(stage, self.pulls[version], self.stage_meshes)
        else:
            params = programs.run(
                _apply_updates, self.stage_params(stage, version - 1), self.local_updates.pop((stage, version - 1))
            )
            self.release(stage, version - 1)
        self.store(stage, version, params)

    def update(self, task: Task, keys: BufferKeys, programs: DevicePrograms) -> None:
        """The update by a microbatch; pushes the wave that it completes."""
        stage, number = task.stage, task.microbatch
        params = self.stage_params(stage, task.version)
        at = self.number, stage
        if at not in self.training.updates:
            self.training.updates[at] = Update(self.training.optimizer, 1, params, self.states[stage])
        sums = self.model.combine(self.sums.pop(keys.sums), self.end_sums.pop(keys.end_sums), self.like)
        updates, self.states[stage] = programs.run(
            self.training.updates[at].updates_only, params, self.states[stage], sums
        )
        if number < self.newest and number + 1 not in self.pulls:
            self.local_updates[stage, number] = updates
        wave = Push(self.number, number // self.wave)
        before = self.wave_sums.pop((stage, wave.wave), None)
        total = updates if before is None else programs.run(_apply_updates, before, updates)
        if (number + 1) % self.wave:
            self.wave_sums[stage, wave.wave] = total
        else:
            self.server.push(stage, wave, total, self.stage_meshes)

    def store(self, stage: int, version: int, params: Any) -> None:
        """Stores a stage's weights for the tasks that use them."""
        self.weights[stage, version], self.ends[stage, version] = self.model.partition(params)

    def stage_params(self, stage: int, version: int) -> Any:
        """A stage's parameters in a version, in the structure of params."""
        return self.model.combine(self.weights[stage, version], self.ends[stage, version], self.like)

    def release(self, stage: int, version: int) -> None:
        """Frees a version after its last use."""
        self.uses[stage, version] -= 1
        if not self.uses[stage, version]:
            del self.weights[stage, version], self.ends[stage, version]

    def all_losses(self) -> jax.Array:
        """The losses in order of microbatches."""
        device = self.stage_meshes.devices_of(self.last)[0]
        losses = [self.losses[number] for number in range(self.stage_meshes.schedule.microbatches)]
        return self.programs(device).run(jnp.stack, losses)


def params_by_stage(model: Model, stage_meshes: StageMeshes, params: Any) -> dict[tuple[int, int], Any]:
    """(stage, 0) -> the stage's parameters, on its device."""
    stages, ends = model.partition(params)
    last = stage_meshes.schedule.stages - 1
    return {
        (stage, 0): model.combine(row, stage_meshes.local_replica(stage_ends(ends, stage, last), device), params)
        for (device, stage), row in stage_meshes.stage_params(stages).items()
    }


def combine_stages(model: Model, stage_meshes: StageMeshes, like: Any, found: dict[int, Any]) -> Any:
    """The parameters of all stages combined, with the shardings of `like`."""
    stages, ends = model.partition(like)
    own = {stage: model.partition(params) for stage, params in found.items()}
    rows = {at: own[at[1]][0] for at in stage_meshes.placements}
    last = stage_meshes.schedule.stages - 1
    return model.combine(
        stage_meshes.stack_stages(rows, stages),
        stage_meshes.put_global(Ends(own[0][1].first, own[last][1].last), ends),
        like,
    )


def _dispatch_order(simulated: WaveSimulation) -> list[tuple[int, Located]]:
    """All workers' tasks by simulated start time: a topological order, since every task takes time."""
    found = []
    for number, worker in enumerate(simulated.workers):
        for device, (order, starts) in enumerate(zip(worker.table.orders, worker.starts, strict=True)):
            for place, (task, start) in enumerate(zip(order, starts, strict=True)):
                found.append((start, number, device, Located(task, device, place)))
    return [(number, located) for _, number, _, located in sorted(found, key=lambda each: each[:3])]


def _check_arguments(
    model: Model,
    waves: Waves,
    mesh: Mesh,
    workers_axis: str,
    params: Any,
    opt_state: Any,
    inputs: Any,
    targets: Any,
) -> None:
    """Raises if the mesh or the arguments do not fit these workers."""
    sizes = dict(mesh.shape)
    if sizes.get(workers_axis) != waves.workers:
        raise ShardingError(
            f"{ASKED}(workers_axis={workers_axis!r})",
            found=[
                f"the mesh {sizes_text(sizes)}",
                f"{waves.workers} speeds",
            ],
            required="the mesh has this axis, with one device group per worker",
            fix=f"sharding.mesh({workers_axis}={waves.workers}, ...)",
        )
    if not isinstance(opt_state, tuple) or len(opt_state) != waves.workers:
        there = f"a tuple of {len(opt_state)}" if isinstance(opt_state, tuple) else type(opt_state).__name__
        fix = f"(optimizer.init(params),) * {waves.workers}"
        raise ShardingError(f"{ASKED}: opt_state", found=there, required="a tuple with one state per worker", fix=fix)
    check_leading_dim(f"{ASKED}: inputs", inputs, waves.workers, "workers")
    check_leading_dim(f"{ASKED}: targets", targets, waves.workers, "workers")
    one = jax.eval_shape(lambda *trees: jax.tree.map(lambda leaf: leaf[0], trees), inputs, targets)
    inputs, targets = one
    check_inputs(ASKED, model, waves.schedule, waves.stages, params, [inputs], [targets])
    if model.partition(params)[1].shared is not None:
        raise ShardingError(
            f"{ASKED}: params/shared",
            found="parameters used by both ends",
            required="no shared parameters: each array is pushed by a single stage",
            fix="separate arrays in 'first' and 'last'",
        )


_apply_updates = jax.jit(apply_updates)
