"""A pipeline as one program per task and device, started in the order of the schedule; devices run them when they can.

Starting does not wait: Python sends all tasks of a step ahead, and each device works through its own. Unlike in one
program no device waits for another that has more to do in the same tick. One process must see all devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..schedule import Schedule
from ..table import Located, Task
from .flow import Arrays, Flow, Passing
from .model import Ends, Model
from .parts import Parts, Slices
from .stage import Stage, traced


@dataclass(kw_only=True, eq=False)
class Worker:
    """The programs of one place on the pipeline's axis, for microbatches or slices of some shape.

    Each has the name of its task in a profile.

    Weights are those of one stage with a leading dim of 1, as they are cut out of the stages' parameters.
    """

    model: Model
    microbatches: int
    mesh: Mesh
    stage: Stage
    weight_shardings: Any

    def run(self, program: Callable[..., Any], *args: Any) -> Any:
        """Starts a program on this worker's devices."""
        with jax.set_mesh(self.mesh):
            return program(*args)

    def zeros(self, tree: Any) -> Any:
        """Gradients of nothing, split as what they are of."""
        return self.run(_zeros, tree, tuple(leaf.sharding for leaf in jax.tree.leaves(tree)))

    @cached_property
    def enter(self) -> Callable[[Ends, Any], Flow]:
        """ends, input -> x."""

        def enter(ends: Ends, inputs: Any) -> Flow:
            return self.stage.passing.flow(self.model.enter(ends, inputs))

        return jax.jit(enter)

    @cached_property
    def forward(self) -> Callable[[Any, Flow, Flow], tuple[Flow, Flow, Arrays]]:
        """weights, x, context -> y, the next slice's context, residuals."""

        def forward(weights: Any, x: Flow, context: Flow) -> tuple[Flow, Flow, Arrays]:
            return self.stage.forward(_only(weights), x, context)

        return jax.jit(forward)

    @cached_property
    def loss(self) -> Callable[[Ends, Flow, Any, jax.Array, Ends], tuple[jax.Array, Ends, Arrays]]:
        """ends, y, target, loss, sums -> the loss and the gradients of the ends with this microbatch's, dy."""

        def loss(ends: Ends, y: Flow, target: Any, loss: jax.Array, sums: Ends) -> tuple[jax.Array, Ends, Arrays]:
            value, (more, dy) = self.model.share(self.stage.passing, ends, y, target, self.microbatches)
            return loss + value.astype(loss.dtype), jax.tree.map(jnp.add, sums, more), dy

        return jax.jit(loss, donate_argnums=(3, 4))

    @cached_property
    def backward(self) -> Callable[[Any, Arrays, Arrays, Arrays, Any], tuple[Any, Arrays, Arrays]]:
        """weights, residuals, dy, the gradient of the next slice's context, sums -> the sums with this microbatch's,
        dx, the context's gradient."""

        def backward(
            weights: Any, residuals: Arrays, dy: Arrays, after: Arrays, sums: Any
        ) -> tuple[Any, Arrays, Arrays]:
            dw, dx, before = self.stage.backward(_only(weights), residuals, dy, after)
            return _added(sums, dw), dx, before

        return jax.jit(backward, donate_argnums=4, out_shardings=(self.weight_shardings, None, None))

    @cached_property
    def backward_end(self) -> Callable[[Any, Arrays, Arrays, Arrays, Any], tuple[Any, Arrays]]:
        """The same where nobody waits for dx."""

        def backward_end(weights: Any, residuals: Arrays, dy: Arrays, after: Arrays, sums: Any) -> tuple[Any, Arrays]:
            dw, _, before = self.stage.backward(_only(weights), residuals, dy, after)
            return _added(sums, dw), before

        return jax.jit(backward_end, donate_argnums=4, out_shardings=(self.weight_shardings, None))

    @cached_property
    def backward_input(self) -> Callable[[Any, Arrays, Arrays, Arrays], tuple[Arrays, Arrays, Arrays]]:
        """weights, residuals, dy, the gradient of the next slice's context -> dx, the context's gradient, what
        backward_weight needs."""

        def backward_input(weights: Any, *rest: Arrays) -> tuple[Arrays, Arrays, Arrays]:
            return self.stage.backward_input(_only(weights), *rest)

        return jax.jit(backward_input)

    @cached_property
    def nothing(self) -> Arrays:
        """The gradient of what the last slice leaves."""
        shapes = self.stage.after_shapes
        return self.run(jax.jit(lambda: [jnp.zeros(s.shape, s.dtype) for s in shapes])) if shapes else []

    @cached_property
    def backward_weight(self) -> Callable[[Any, Arrays, Any], Any]:
        """weights, saved, sums -> the sums with this microbatch's."""

        def backward_weight(weights: Any, saved: Arrays, sums: Any) -> Any:
            return _added(sums, self.stage.backward_weight(_only(weights), saved))

        return jax.jit(backward_weight, donate_argnums=2, out_shardings=self.weight_shardings)

    @cached_property
    def entered(self) -> Callable[[Ends, Any, Arrays, Ends], Ends]:
        """ends, input, dx, sums -> the sums with this microbatch's gradients of what comes before the first stage."""

        def entered(ends: Ends, inputs: Any, dx: Arrays, sums: Ends) -> Ends:
            return jax.tree.map(jnp.add, sums, self.model.entered(self.stage.passing, ends, inputs, dx))

        return jax.jit(entered, donate_argnums=3)


Workers = list[list[Worker]]
"""[device][slice]."""


class Step:
    """One step of a pipeline over the devices of a mesh."""

    def __init__(self, model: Model, schedule: Schedule, parts: Parts, stages: Any, ends: Ends, inputs: Slices):
        self.model, self.schedule, self.parts = model, schedule, parts
        self.order = dispatch_order(schedule)
        self.workers = workers(model, parts, stages, ends, inputs, microbatches=schedule.microbatches)

    def __call__(self, stages: Any, ends: Ends, inputs: Slices, targets: Slices) -> tuple[jax.Array, Any, Ends]:
        """The loss, and the gradients as the stages' parameters and the ends came."""
        run = _Whole(self.model, self.parts, self.workers, inputs, targets)
        run.begin(stages, ends)
        for located in self.order:
            run.task(located)
        return run.results()


class Keys(NamedTuple):
    """Under which names a task finds what other tasks use too."""

    weights: Any
    ends: Any
    sums: Any
    end_sums: Any
    loss: Any


class Run:
    """What lies where while tasks run; dropped as soon as nothing needs it any more.

    What tasks share, weights and sums of gradients, a kind of run fills in, under the names that its `keys` give.
    """

    def __init__(self, model: Model, parts: Parts, workers: Workers, inputs: Slices, targets: Slices):
        self.model, self.parts, self.workers = model, parts, workers
        self.last, self.last_slice = parts.schedule.stages - 1, parts.schedule.slices - 1
        passing = Passing.of(model.context)
        self.contexts = {
            device: passing.flow(parts.replica(model.context, device)) for device in range(parts.schedule.devices)
        }
        self.inputs = {device: parts.units(inputs, device) for device in parts.where(0)}
        self.targets = {device: parts.units(targets, device) for device in parts.where(self.last)}
        self.held: dict[tuple[str, int, int], Any] = {}
        self.weights: dict[Any, Any] = {}
        self.ends: dict[Any, Ends] = {}
        self.sums: dict[Any, Any] = {}
        self.end_sums: dict[Any, Ends] = {}
        self.losses: dict[Any, jax.Array] = {}

    def keys(self, task: Task, device: int) -> Keys:
        """Under which names a task finds what other tasks use too."""
        raise NotImplementedError

    def worker(self, device: int, part: int = 0) -> Worker:
        return self.workers[device][part]

    def task(self, located: Located) -> None:
        """Starts a task and sends on what it makes."""
        task, device = located.task, located.device
        run = {
            "forward": self.forward,
            "backward": self.backward,
            "backward-input": self.backward_input,
            "backward-weight": self.backward_weight,
        }
        run[task.kind](task, device, self.worker(device, task.slice))

    def forward(self, task: Task, device: int, worker: Worker) -> None:
        stage, unit, keys = task.stage, self.unit(task), self.keys(task, device)
        if stage == 0:
            x = worker.run(worker.enter, self.ends[keys.ends], self.inputs[device][unit])
        else:
            x = self.held.pop(("input", stage, unit))
        context = self.held.pop(("context", stage, unit)) if task.slice else self.contexts[device]
        found = worker.run(worker.forward, self.weights[keys.weights], x, context)
        y, after, self.held["residual", stage, unit] = found
        if task.slice < self.last_slice:
            self.held["context", stage, unit + 1] = after
        if stage < self.last:
            self.held["input", stage + 1, unit] = self.parts.moved(y, self.parts.home(stage + 1, unit), device)
            return
        sums = self.losses[keys.loss], self.end_sums[keys.end_sums]
        found = worker.run(worker.loss, self.ends[keys.ends], y, self.targets[device][unit], *sums)
        self.losses[keys.loss], self.end_sums[keys.end_sums], self.held["gradient", stage, unit] = found

    def backward(self, task: Task, device: int, worker: Worker) -> None:
        keys = self.keys(task, device)
        args = self.weights[keys.weights], *self.needed(task, worker), self.sums[keys.sums]
        if task.stage == 0 and self.model.first_fn is None:
            self.sums[keys.sums], before = worker.run(worker.backward_end, *args)
        else:
            self.sums[keys.sums], dx, before = worker.run(worker.backward, *args)
            self.sent_back(task, device, worker, dx)
        self.handed_back(task, before)

    def backward_input(self, task: Task, device: int, worker: Worker) -> None:
        args = self.weights[self.keys(task, device).weights], *self.needed(task, worker)
        dx, before, self.held["saved", task.stage, self.unit(task)] = worker.run(worker.backward_input, *args)
        self.sent_back(task, device, worker, dx)
        self.handed_back(task, before)

    def backward_weight(self, task: Task, device: int, worker: Worker) -> None:
        keys = self.keys(task, device)
        saved = self.held.pop(("saved", task.stage, self.unit(task)))
        sums = self.sums[keys.sums]
        self.sums[keys.sums] = worker.run(worker.backward_weight, self.weights[keys.weights], saved, sums)

    def unit(self, task: Task) -> int:
        return self.parts.schedule.unit(task)

    def needed(self, task: Task, worker: Worker) -> tuple[Arrays, Arrays, Arrays]:
        """The residuals, the gradient of the output, and that of the next slice's context."""
        at = task.stage, self.unit(task)
        after = worker.nothing if task.slice == self.last_slice else self.held.pop(("context gradient", *at))
        return self.held.pop(("residual", *at)), self.held.pop(("gradient", *at)), after

    def handed_back(self, task: Task, before: Arrays) -> None:
        """Leaves the slice before the gradient of what it has left."""
        if task.slice:
            self.held["context gradient", task.stage, self.unit(task) - 1] = before

    def sent_back(self, task: Task, device: int, worker: Worker, dx: Arrays) -> None:
        stage, unit = task.stage, self.unit(task)
        if stage > 0:
            self.held["gradient", stage - 1, unit] = self.parts.moved(dx, self.parts.home(stage - 1, unit), device)
        elif self.model.first_fn is not None:
            keys = self.keys(task, device)
            args = self.ends[keys.ends], self.inputs[device][unit], dx, self.end_sums[keys.end_sums]
            self.end_sums[keys.end_sums] = worker.run(worker.entered, *args)


class _Whole(Run):
    """All tasks with the same weights, all gradients added up."""

    def begin(self, stages: Any, ends: Ends) -> None:
        """Puts weights, ends and empty sums where they are needed."""
        self.stages_like, self.ends_like = stages, ends
        self.weights.update(self.parts.stages(stages))
        outer = {*self.parts.where(0), *self.parts.where(self.last)}
        self.ends.update({device: self.parts.replica(ends, device) for device in outer})
        for device, stage in self.parts.places:
            self.sums[device, stage] = self.worker(device).zeros(self.weights[device, stage])
        self.end_sums.update({device: self.worker(device).zeros(self.ends[device]) for device in outer})
        self.losses.update({device: self.parts.zero(device) for device in self.parts.where(self.last)})

    def keys(self, task: Task, device: int) -> Keys:
        """By stage and device."""
        at = device, task.stage
        return Keys(weights=at, ends=device, sums=at, end_sums=device, loss=device)

    def results(self) -> tuple[jax.Array, Any, Ends]:
        """All gradients, put together again."""
        loss = self.parts.total(self.losses)
        stages = self.parts.joined(self.sums, self.stages_like)
        return loss, stages, self.parts.ends_total(self.end_sums, self.ends_like)


def workers(model: Model, parts: Parts, stages: Any, ends: Ends, inputs: Slices, *, microbatches: int) -> Workers:
    """For each place on the pipeline's axis one per slice, the same for slices of one shape.

    Their gradients are of the loss's share of so many microbatches.
    """
    weights = jax.eval_shape(lambda stages: _at(stages, 0), stages)
    shardings = parts.stage_shardings(stages)
    found = []
    for device, mesh in enumerate(parts.meshes):
        own: dict[Any, Worker] = {}
        keys = []
        context = jax.eval_shape(lambda: model.context)
        for part in inputs:
            x = jax.eval_shape(lambda ends, part: model.enter(ends, _at(part, 0)), ends, part)
            key = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((x, context)))
            if key not in own:
                with jax.set_mesh(mesh):
                    stage = traced(model.stage, weights, x, context)
                own[key] = Worker(
                    model=model, microbatches=microbatches, mesh=mesh, stage=stage, weight_shardings=shardings[device]
                )
            keys.append(key)
            if context is not None:
                context = jax.eval_shape(model.stage_fn, weights, x, context)[1]
        found.append([own[key] for key in keys])
    return found


def dispatch_order(schedule: Schedule) -> tuple[Located, ...]:
    """All tasks, each after those that it needs and those before it on its device; ready ones in turns."""
    rows = schedule.ticks()
    places: defaultdict[int, int] = defaultdict(int)
    order = []
    for row in rows:
        for device, task in enumerate(row):
            if task is not None:
                order.append(Located(task, device, places[device]))
                places[device] += 1
    return tuple(order)


@partial(jax.jit, static_argnums=1)
def _zeros(tree: Any, shardings: tuple[Any, ...]) -> Any:
    leaves, tree_def = jax.tree.flatten(tree)
    zeros = map(jnp.zeros_like, leaves)
    return jax.tree.unflatten(tree_def, map(jax.lax.with_sharding_constraint, zeros, shardings))


def _only(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _added(sums: Any, more: Any) -> Any:
    return jax.tree.map(lambda total, one: total + one[None], sums, more)
