"""Training by several pipelines that exchange their updates in waves (see ``waves``).

The weights of all are kept stage by stage on the first worker's devices: they get each wave's updates in the order in
which waves are pushed, and are kept in a version as long as a worker is still to pull it.
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
from .asynchronous import Train, ends_of, optimizer_states
from .executors.arguments import facts, leading, mesh_in_force, single_controller, valid
from .executors.model import Ends, LossFn, Model, Remat, StageFn
from .executors.parts import Parts
from .executors.per_stage import Keys, Run, Worker, Workers, workers
from .optimizer import States, Update, applied
from .table import Located, Task
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
    """Training by several pipelines that exchange the sums of their updates in waves (wave synchronous parallel).

    A minibatch meets at every stage the weights that its worker had when it was admitted: those of all when the worker
    last pulled them, and its own updates since. When that is, ``waves.simulate()`` says: by simulated time, so that the
    same is computed each time. The optimizer gets the weights that the minibatch met; each worker has its own state.

    The function that comes back takes, outside of traces and in a single process:

    - params: one for all workers, as ``pipeline.value_and_grad`` takes them; without ``"shared"``.
    - opt_state: a tuple of the optimizer's state of each worker, at first ``(optimizer.init(params),) * workers``.
    - inputs, targets: pytrees with leaves [workers, microbatches of the whole stretch, ...].

    It gives the parameters with all workers' waves, the states, and the losses [workers, microbatches].

    Args:
        stage_fn: see ``pipeline.value_and_grad``.
        loss_fn: the same.
        waves: how many workers, how fast they are, and how many waves they may be apart.
        optimizer: see ``pipeline.train_async``.
        axis: of the mesh; as long as there are stages.
        workers_axis: of the mesh; as long as there are workers.
        first_fn: see ``pipeline.value_and_grad``.
        last_fn: the same.
        remat: the same.

    Raises:
        ShardingError: before anything compiles: what ``pipeline.train_async`` refuses; no such axis for the workers, or
            another number of them; ``"shared"`` parameters.

    References:
        Park et al., HetPipe, USENIX ATC 2020, sections 4 and 5. There a parameter server is on the hosts.
    """
    model = Model(stage_fn=stage_fn, loss_fn=loss_fn, first_fn=first_fn, last_fn=last_fn, remat=remat)
    simulated = waves.simulate()
    trainings: dict[Any, WaveTraining] = {}

    def run(params: Any, opt_state: Any, inputs: Any, targets: Any) -> tuple[Any, Any, jax.Array]:
        mesh = single_controller(ASKED, mesh_in_force(ASKED, waves.schedule, axis))
        _valid(model, waves, mesh, workers_axis, params, opt_state, inputs, targets)
        given = jax.tree.map(jnp.asarray, (params, tuple(opt_state), inputs, targets))
        key = mesh, jax.tree.structure(given), tuple(map(facts, jax.tree.leaves(given)))
        if key not in trainings:
            states = [optimizer_states(ASKED, model, waves.schedule, optimizer, params, state) for state in opt_state]
            outer = Parts(mesh=mesh, axis=workers_axis, schedule=waves.schedule, rows=tuple(range(waves.workers)))
            trainings[key] = WaveTraining(model, simulated, outer, axis, optimizer, states[0])
        return trainings[key](*given)

    return run


class WaveTraining:
    """A stretch of a run over the devices of a mesh, one of whose axes has the workers."""

    def __init__(
        self,
        model: Model,
        simulated: WaveSimulation,
        outer: Parts,
        axis: str,
        optimizer: GradientTransformation,
        states: States,
    ):
        self.model, self.simulated, self.outer, self.optimizer, self.states = model, simulated, outer, optimizer, states
        rows = tuple(range(outer.schedule.stages))
        self.parts = [Parts(mesh=mesh, axis=axis, schedule=outer.schedule, rows=rows) for mesh in outer.meshes]
        self.order = _order(simulated)
        self.workers: list[Workers] = []
        self.updates: dict[tuple[int, int], Update] = {}

    def __call__(self, params: Any, opt_state: Any, inputs: Any, targets: Any) -> tuple[Any, Any, jax.Array]:
        """Parameters, states and losses."""
        runs = []
        everyone = Everyone(self.model, self.parts[0], self.simulated, self.outer.replica(params, 0))
        data = zip(self.outer.each(inputs), self.outer.each(targets), strict=True)
        for number, (x, target) in enumerate(data):
            own = self.outer.replica(params, number)
            if len(self.workers) == number:
                self.workers.append(
                    workers(self.model, self.parts[number], *self.model.parts(own), [x], microbatches=1)
                )
            runs.append(WaveRun(self, number, everyone, own, opt_state[number], x, target))
        for number, located in self.order:
            runs[number].task(located)
        mesh = self.outer.mesh
        losses = [self.outer.placed(run.all_losses(), jnp.zeros(())) for run in runs]
        states = tuple(
            self.states.joined(run.states, like, parts)
            for run, like, parts in zip(runs, opt_state, self.parts, strict=True)
        )
        with jax.set_mesh(mesh):
            return self.outer.placed(everyone.result(), params), states, jnp.stack(losses)


class Everyone:
    """The weights of all, by stage and how many waves have been pushed, on the first worker's devices."""

    def __init__(self, model: Model, parts: Parts, simulated: WaveSimulation, params: Any):
        self.model, self.parts, self.like, self.pushes = model, parts, params, simulated.pushes
        self.versions = pieces(model, parts, params)
        self.newest = dict.fromkeys(range(parts.schedule.stages), 0)
        self.waiting: dict[tuple[int, Push], Any] = {}
        pulls = [pushed for pulls in simulated.pulls for pushed in pulls.values()]
        self.uses = Counter((stage, pushed) for pushed in pulls for stage in self.newest)

    def push(self, stage: int, wave: Push, total: Any, parts: Parts) -> None:
        """Adds the sum of a wave's updates, after all that are pushed before it."""
        device = self.parts.where(stage)[0]
        self.waiting[stage, wave] = total if parts is self.parts else self.parts.brought(total, device)
        while (old := self.newest[stage]) < len(self.pushes) and (stage, self.pushes[old]) in self.waiting:
            more = self.waiting.pop((stage, self.pushes[old]))
            with jax.set_mesh(self.parts.meshes[device]):
                self.versions[stage, old + 1] = _applied(self.versions[stage, old], more)
            self.newest[stage] = old + 1
            self.drop_unused(stage, old)

    def pull(self, stage: int, pushed: int, parts: Parts) -> Any:
        """A stage's weights after so many pushes, for a worker."""
        found = self.versions[stage, pushed]
        self.uses[stage, pushed] -= 1
        if pushed < self.newest[stage]:
            self.drop_unused(stage, pushed)
        return found if parts is self.parts else parts.brought(found, parts.where(stage)[0])

    def drop_unused(self, stage: int, pushed: int) -> None:
        """Lets go of weights that are not the newest, unless a worker is still to pull them."""
        if not self.uses[stage, pushed]:
            del self.versions[stage, pushed]

    def result(self) -> Any:
        """The newest, put together again."""
        return joined(self.model, self.parts, self.like, {s: self.versions[s, new] for s, new in self.newest.items()})


class WaveRun(Run):
    """The tasks of one worker; a version of its weights is what it pulled last with its own updates since."""

    def __init__(
        self,
        training: WaveTraining,
        number: int,
        everyone: Everyone,
        params: Any,
        state: Any,
        inputs: Any,
        targets: Any,
    ):
        super().__init__(training.model, training.parts[number], training.workers[number], [inputs], [targets])
        self.training, self.number, self.everyone, self.like = training, number, everyone, params
        self.states = training.states.cut(state, self.parts)
        waves = training.simulated.waves
        self.wave = waves.wave
        pulls = training.simulated.pulls[number]
        self.pulls = {microbatch - (waves.wave - 1): pushed for microbatch, pushed in pulls.items()}
        self.newest = max(task.version for order in waves.schedule.orders for task in order)
        self.uses = Counter((task.stage, task.version) for order in waves.schedule.orders for task in order)
        for stage in range(waves.stages):  # what a version is made from is used once more
            self.uses.update((stage, made - 1) for made in range(1, self.newest + 1) if made not in self.pulls)
        self.own: dict[tuple[int, int], Any] = {}
        self.pushing: dict[tuple[int, int], Any] = {}
        for (stage, _), piece in pieces(self.model, self.parts, params).items():
            self.keep(stage, 0, piece)

    def keys(self, task: Task, device: int) -> Keys:
        """By stage, and version or microbatch."""
        weights, sums = (task.stage, task.version), (task.stage, task.microbatch)
        return Keys(weights=weights, ends=weights, sums=sums, end_sums=sums, loss=task.microbatch)

    def task(self, located: Located) -> None:
        """Starts a task; before it makes the weights that it meets, after it the update whose gradient is complete."""
        task, device = located.task, located.device
        worker, keys = self.worker(device), self.keys(task, device)
        if task.kind == "forward":
            self.make(task.stage, task.version, worker)
            self.sums[keys.sums] = worker.zeros(self.weights[keys.weights])
            self.end_sums[keys.end_sums] = worker.zeros(self.ends[keys.ends])
            if task.stage == self.last:
                self.losses[keys.loss] = self.parts.zero(device)
        super().task(located)
        if task.frees_activation:
            self.update(task, keys, worker)
        self.used(task.stage, task.version)

    def make(self, stage: int, version: int, worker: Worker) -> None:
        """The weights with so many of this worker's updates."""
        if (stage, version) in self.weights:
            return
        if version in self.pulls:
            piece = self.everyone.pull(stage, self.pulls[version], self.parts)
        else:
            piece = worker.run(_applied, self.piece(stage, version - 1), self.own.pop((stage, version - 1)))
            self.used(stage, version - 1)
        self.keep(stage, version, piece)

    def update(self, task: Task, keys: Keys, worker: Worker) -> None:
        """The update by a microbatch, which ends a wave or not."""
        stage, number = task.stage, task.microbatch
        params = self.piece(stage, task.version)
        at = self.number, stage
        if at not in self.training.updates:
            self.training.updates[at] = Update(self.training.optimizer, 1, params, self.states[stage])
        sums = self.model.whole(self.sums.pop(keys.sums), self.end_sums.pop(keys.end_sums), self.like)
        own, self.states[stage] = worker.run(self.training.updates[at].apart, params, self.states[stage], sums)
        if number < self.newest and number + 1 not in self.pulls:
            self.own[stage, number] = own
        wave = Push(self.number, number // self.wave)
        before = self.pushing.pop((stage, wave.wave), None)
        total = own if before is None else worker.run(_applied, before, own)
        if (number + 1) % self.wave:
            self.pushing[stage, wave.wave] = total
        else:
            self.everyone.push(stage, wave, total, self.parts)

    def keep(self, stage: int, version: int, piece: Any) -> None:
        """Holds a stage's weights for the tasks that use them."""
        self.weights[stage, version], self.ends[stage, version] = self.model.parts(piece)

    def piece(self, stage: int, version: int) -> Any:
        """A stage's parameters in a version, in the form of all."""
        return self.model.whole(self.weights[stage, version], self.ends[stage, version], self.like)

    def used(self, stage: int, version: int) -> None:
        """Lets go of a version after its last use."""
        self.uses[stage, version] -= 1
        if not self.uses[stage, version]:
            del self.weights[stage, version], self.ends[stage, version]

    def all_losses(self) -> jax.Array:
        """Those of the microbatches, in their order."""
        device = self.parts.where(self.last)[0]
        losses = [self.losses[number] for number in range(self.parts.schedule.microbatches)]
        return self.worker(device).run(jnp.stack, losses)


def pieces(model: Model, parts: Parts, params: Any) -> dict[tuple[int, int], Any]:
    """(stage, 0) -> what the stage has of the parameters, on its device."""
    stages, ends = model.parts(params)
    last = parts.schedule.stages - 1
    return {
        (stage, 0): model.whole(row, parts.replica(ends_of(ends, stage, last), device), params)
        for (device, stage), row in parts.stages(stages).items()
    }


def joined(model: Model, parts: Parts, like: Any, found: dict[int, Any]) -> Any:
    """Pieces of all stages as the parameters that they are of, as others lie."""
    stages, ends = model.parts(like)
    own = {stage: model.parts(piece) for stage, piece in found.items()}
    rows = {at: own[at[1]][0] for at in parts.places}
    last = parts.schedule.stages - 1
    return model.whole(parts.joined(rows, stages), parts.placed(Ends(own[0][1].first, own[last][1].last), ends), like)


def _order(simulated: WaveSimulation) -> list[tuple[int, Located]]:
    """All workers' tasks as they begin in simulated time: each after what it waits for, since tasks take some."""
    found = []
    for number, worker in enumerate(simulated.workers):
        for device, (order, starts) in enumerate(zip(worker.table.orders, worker.starts, strict=True)):
            for place, (task, start) in enumerate(zip(order, starts, strict=True)):
                found.append((start, number, device, Located(task, device, place)))
    return [(number, located) for _, number, _, located in sorted(found, key=lambda each: each[:3])]


def _valid(
    model: Model,
    waves: Waves,
    mesh: Mesh,
    workers_axis: str,
    params: Any,
    opt_state: Any,
    inputs: Any,
    targets: Any,
) -> None:
    """Raises where the mesh or what is given isn't one for these workers."""
    sizes = dict(mesh.shape)
    if sizes.get(workers_axis) != waves.workers:
        raise ShardingError(
            f"{ASKED}(workers_axis={workers_axis!r})",
            there=[
                f"the mesh {sizes_text(sizes)}",
                f"{waves.workers} speeds",
            ],
            must="the mesh has this axis, as long as there are workers",
            fix=f"sharding.mesh({workers_axis}={waves.workers}, ...)",
        )
    if not isinstance(opt_state, tuple) or len(opt_state) != waves.workers:
        there = f"{len(opt_state)} of them" if isinstance(opt_state, tuple) else type(opt_state).__name__
        fix = f"(optimizer.init(params),) * {waves.workers}"
        raise ShardingError(f"{ASKED}: opt_state", there=there, must="a tuple of each worker's state", fix=fix)
    leading(f"{ASKED}: inputs", inputs, waves.workers, "workers")
    leading(f"{ASKED}: targets", targets, waves.workers, "workers")
    one = jax.eval_shape(lambda *trees: jax.tree.map(lambda leaf: leaf[0], trees), inputs, targets)
    inputs, targets = one
    valid(ASKED, model, waves.schedule, waves.stages, params, [inputs], [targets])
    if model.parts(params)[1].shared is not None:
        raise ShardingError(
            f"{ASKED}: params/shared",
            there="parameters of both ends",
            must="each array is pushed by one stage, when that is done with a wave",
            fix="an array in 'first' and one in 'last'",
        )


_applied = jax.jit(applied)
