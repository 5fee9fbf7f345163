"""A pipeline as one program per task and device, started in the order of the schedule; devices run them when they can.

Starting does not wait: Python sends all tasks of a step ahead, and each device works through its own. Unlike in one
program no device waits for another that has more to do in the same tick. One process must see all devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .flow import Arrays, Flow
from .model import Ends, Model
from .parts import Parts
from .schedule import Schedule
from .stage import Stage, traced
from .table import Located, Task


@dataclass(kw_only=True, eq=False)
class Worker:
    """The programs of one place on the pipeline's axis.

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
        return jax.jit(lambda ends, inputs: self.stage.passing.flow(self.model.enter(ends, inputs)))

    @cached_property
    def forward(self) -> Callable[[Any, Flow], tuple[Flow, Arrays]]:
        """weights, x -> y, residuals."""
        return jax.jit(lambda weights, x: self.stage.forward(_only(weights), x))

    @cached_property
    def loss(self) -> Callable[[Ends, Flow, Any, jax.Array, Ends], tuple[jax.Array, Ends, Arrays]]:
        """ends, y, target, loss, sums -> the loss and the gradients of the ends with this microbatch's, dy."""

        def run(ends: Ends, y: Flow, target: Any, loss: jax.Array, sums: Ends) -> tuple[jax.Array, Ends, Arrays]:
            value, (more, dy) = self.model.share(self.stage.passing, ends, y, target, self.microbatches)
            return loss + value.astype(loss.dtype), jax.tree.map(jnp.add, sums, more), dy

        return jax.jit(run, donate_argnums=(3, 4))

    @cached_property
    def backward(self) -> Callable[[Any, Arrays, Arrays, Any], tuple[Any, Arrays]]:
        """weights, residuals, dy, sums -> the sums with this microbatch's, dx."""

        def run(weights: Any, residuals: Arrays, gradient: Arrays, sums: Any) -> tuple[Any, Arrays]:
            dw, dx = self.stage.backward(_only(weights), residuals, gradient)
            return _added(sums, dw), dx

        return jax.jit(run, donate_argnums=3, out_shardings=(self.weight_shardings, None))

    @cached_property
    def backward_end(self) -> Callable[[Any, Arrays, Arrays, Any], Any]:
        """The same where nobody waits for dx."""

        def run(weights: Any, residuals: Arrays, gradient: Arrays, sums: Any) -> Any:
            return _added(sums, self.stage.backward(_only(weights), residuals, gradient)[0])

        return jax.jit(run, donate_argnums=3, out_shardings=self.weight_shardings)

    @cached_property
    def backward_input(self) -> Callable[[Any, Arrays, Arrays], tuple[Arrays, Arrays]]:
        """weights, residuals, dy -> dx, what backward_weight needs."""
        return jax.jit(lambda weights, residuals, dy: self.stage.backward_input(_only(weights), residuals, dy))

    @cached_property
    def backward_weight(self) -> Callable[[Any, Arrays, Any], Any]:
        """weights, saved, sums -> the sums with this microbatch's."""

        def run(weights: Any, saved: Arrays, sums: Any) -> Any:
            return _added(sums, self.stage.backward_weight(_only(weights), saved))

        return jax.jit(run, donate_argnums=2, out_shardings=self.weight_shardings)

    @cached_property
    def entered(self) -> Callable[[Ends, Any, Arrays, Ends], Ends]:
        """ends, input, dx, sums -> the sums with this microbatch's gradients of what comes before the first stage."""

        def run(ends: Ends, inputs: Any, dx: Arrays, sums: Ends) -> Ends:
            return jax.tree.map(jnp.add, sums, self.model.entered(self.stage.passing, ends, inputs, dx))

        return jax.jit(run, donate_argnums=3)


class Step:
    """One step of a pipeline over the devices of a mesh."""

    def __init__(self, model: Model, schedule: Schedule, parts: Parts, stages: Any, ends: Ends, inputs: Any):
        self.model, self.schedule, self.parts = model, schedule, parts
        self.order = dispatch_order(schedule)
        x = jax.eval_shape(lambda ends, inputs: model.enter(ends, _at(inputs, 0)), ends, inputs)
        weights = jax.eval_shape(lambda stages: _at(stages, 0), stages)
        shardings = parts.stage_shardings(stages)
        self.workers = []
        for device, mesh in enumerate(parts.meshes):
            with jax.set_mesh(mesh):
                stage = traced(model.stage, weights, x)
            self.workers.append(
                Worker(
                    model=model,
                    microbatches=schedule.microbatches,
                    mesh=mesh,
                    stage=stage,
                    weight_shardings=shardings[device],
                )
            )

    def __call__(self, stages: Any, ends: Ends, inputs: Any, targets: Any) -> tuple[jax.Array, Any, Ends]:
        """The loss, and the gradients as the stages' parameters and the ends came."""
        run = _Run(self, stages, ends, inputs, targets)
        for located in self.order:
            run.task(located)
        return run.results()


class _Run:
    """What lies where during a step; dropped as soon as nothing needs it any more."""

    def __init__(self, step: Step, stages: Any, ends: Ends, inputs: Any, targets: Any):
        self.step, self.parts = step, step.parts
        self.last = step.schedule.stages - 1
        self.weights = self.parts.stages(stages)
        self.sums = {at: self.worker(at[0]).zeros(w) for at, w in self.weights.items()}
        outer = {device for device, own in enumerate(step.schedule.placement) if {0, self.last} & set(own)}
        self.ends = {device: self.parts.replica(ends, device) for device in outer}
        self.end_sums = {device: self.worker(device).zeros(e) for device, e in self.ends.items()}
        at = self.parts.where(0), self.parts.where(self.last)
        self.inputs = {device: self.parts.microbatches(inputs, device) for device in at[0]}
        self.targets = {device: self.parts.microbatches(targets, device) for device in at[1]}
        self.losses = {device: self.parts.zero(device) for device in at[1]}
        self.held: dict[tuple[str, int, int], Any] = {}
        self.stages_like, self.ends_like = stages, ends

    def worker(self, device: int) -> Worker:
        return self.step.workers[device]

    def task(self, located: Located) -> None:
        """Starts a task and sends on what it makes."""
        task, device = located.task, located.device
        run = {
            "forward": self.forward,
            "backward": self.backward,
            "backward-input": self.backward_input,
            "backward-weight": self.backward_weight,
        }
        run[task.kind](task, device, self.worker(device))

    def forward(self, task: Task, device: int, worker: Worker) -> None:
        _, stage, m, *_ = task
        if stage == 0:
            x = worker.run(worker.enter, self.ends[device], self.inputs[device][m])
        else:
            x = self.held.pop(("input", stage, m))
        y, self.held["residual", stage, m] = worker.run(worker.forward, self.weights[device, stage], x)
        if stage < self.last:
            self.held["input", stage + 1, m] = self.parts.moved(y, self.parts.home(stage + 1, m), device)
            return
        args = self.ends[device], y, self.targets[device][m], self.losses[device], self.end_sums[device]
        found = worker.run(worker.loss, *args)
        self.losses[device], self.end_sums[device], self.held["gradient", stage, m] = found

    def backward(self, task: Task, device: int, worker: Worker) -> None:
        _, stage, m, *_ = task
        at = device, stage
        args = self.weights[at], *self.needed(stage, m), self.sums[at]
        if stage == 0 and self.step.model.first_fn is None:
            self.sums[at] = worker.run(worker.backward_end, *args)
            return
        self.sums[at], dx = worker.run(worker.backward, *args)
        self.sent_back(task, device, worker, dx)

    def backward_input(self, task: Task, device: int, worker: Worker) -> None:
        _, stage, m, *_ = task
        args = self.weights[device, stage], *self.needed(stage, m)
        dx, self.held["saved", stage, m] = worker.run(worker.backward_input, *args)
        self.sent_back(task, device, worker, dx)

    def backward_weight(self, task: Task, device: int, worker: Worker) -> None:
        _, stage, m, *_ = task
        at = device, stage
        saved = self.held.pop(("saved", stage, m))
        self.sums[at] = worker.run(worker.backward_weight, self.weights[at], saved, self.sums[at])

    def needed(self, stage: int, microbatch: int) -> tuple[Arrays, Arrays]:
        """The residuals, and the gradient of the output."""
        return self.held.pop(("residual", stage, microbatch)), self.held.pop(("gradient", stage, microbatch))

    def sent_back(self, task: Task, device: int, worker: Worker, dx: Arrays) -> None:
        _, stage, m, *_ = task
        if stage > 0:
            self.held["gradient", stage - 1, m] = self.parts.moved(dx, self.parts.home(stage - 1, m), device)
        elif self.step.model.first_fn is not None:
            args = self.ends[device], self.inputs[device][m], dx, self.end_sums[device]
            self.end_sums[device] = worker.run(worker.entered, *args)

    def results(self) -> tuple[jax.Array, Any, Ends]:
        """All gradients, put together again."""
        loss = self.parts.total(self.losses)
        stages = self.parts.joined(self.sums, self.stages_like)
        return loss, stages, self.parts.ends_total(self.end_sums, self.ends_like)


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
