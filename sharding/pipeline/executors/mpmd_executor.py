"""A pipeline as one program per task and device, dispatched asynchronously in the order of the schedule.

Python dispatches all tasks of a step ahead, and each device works through its own. Unlike in one program, no device
waits for a longer task of another device in the same tick. A single process must see all devices.
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
from ..task_table import Located, Task
from .activations import Activation, ActivationTree, Arrays
from .pipelined_model import Ends, Model
from .stage_meshes import Slices, StageMeshes
from .stage_programs import StagePrograms, trace_stage


@dataclass(kw_only=True, eq=False)
class DevicePrograms:
    """The programs of one position on the pipeline axis, for microbatches or slices of one shape.

    Each has the name of its task in a profile. Weights are those of one stage with a leading dim of 1, as sliced from
    the stacked parameters.
    """

    model: Model
    microbatches: int
    mesh: Mesh
    stage: StagePrograms
    weight_shardings: Any

    def run(self, program: Callable[..., Any], *args: Any) -> Any:
        """Dispatches a program on these devices."""
        with jax.set_mesh(self.mesh):
            return program(*args)

    def zeros(self, tree: Any) -> Any:
        """Zero gradients, with the shardings of `tree`."""
        return self.run(_zeros, tree, tuple(leaf.sharding for leaf in jax.tree.leaves(tree)))

    @cached_property
    def enter(self) -> Callable[[Ends, Any], Activation]:
        """ends, input -> x."""

        def enter(ends: Ends, inputs: Any) -> Activation:
            return self.stage.activation_tree.flatten(self.model.enter(ends, inputs))

        return jax.jit(enter)

    @cached_property
    def forward(self) -> Callable[[Any, Activation, Activation], tuple[Activation, Activation, Arrays]]:
        """weights, x, context -> y, the next slice's context, residuals."""

        def forward(weights: Any, x: Activation, context: Activation) -> tuple[Activation, Activation, Arrays]:
            return self.stage.forward(_first_row(weights), x, context)

        return jax.jit(forward)

    @cached_property
    def loss(self) -> Callable[[Ends, Activation, Any, jax.Array, Ends], tuple[jax.Array, Ends, Arrays]]:
        """ends, y, target, loss, sums -> the loss and the ends' gradients including this microbatch's, dy."""

        def loss(ends: Ends, y: Activation, target: Any, loss: jax.Array, sums: Ends) -> tuple[jax.Array, Ends, Arrays]:
            value, (more, dy) = self.model.loss_and_gradients(
                self.stage.activation_tree, ends, y, target, self.microbatches
            )
            return loss + value.astype(loss.dtype), jax.tree.map(jnp.add, sums, more), dy

        return jax.jit(loss, donate_argnums=(3, 4))

    @cached_property
    def backward(self) -> Callable[[Any, Arrays, Arrays, Arrays, Any], tuple[Any, Arrays, Arrays]]:
        """weights, residuals, dy, the gradient of the next slice's context, sums -> the sums including this
        microbatch's gradients, dx, the context's gradient."""

        def backward(
            weights: Any, residuals: Arrays, dy: Arrays, after: Arrays, sums: Any
        ) -> tuple[Any, Arrays, Arrays]:
            dw, dx, before = self.stage.backward(_first_row(weights), residuals, dy, after)
            return _accumulate(sums, dw), dx, before

        return jax.jit(backward, donate_argnums=4, out_shardings=(self.weight_shardings, None, None))

    @cached_property
    def backward_end(self) -> Callable[[Any, Arrays, Arrays, Arrays, Any], tuple[Any, Arrays]]:
        """The same without dx, for the first stage."""

        def backward_end(weights: Any, residuals: Arrays, dy: Arrays, after: Arrays, sums: Any) -> tuple[Any, Arrays]:
            dw, _, before = self.stage.backward(_first_row(weights), residuals, dy, after)
            return _accumulate(sums, dw), before

        return jax.jit(backward_end, donate_argnums=4, out_shardings=(self.weight_shardings, None))

    @cached_property
    def backward_input(self) -> Callable[[Any, Arrays, Arrays, Arrays], tuple[Arrays, Arrays, Arrays]]:
        """weights, residuals, dy, the gradient of the next slice's context -> dx, the context's gradient, operands of
        backward_weight."""

        def backward_input(weights: Any, *rest: Arrays) -> tuple[Arrays, Arrays, Arrays]:
            return self.stage.backward_input(_first_row(weights), *rest)

        return jax.jit(backward_input)

    @cached_property
    def zero_context_gradient(self) -> Arrays:
        """The zero gradient of the last slice's context."""
        shapes = self.stage.after_shapes
        return self.run(jax.jit(lambda: [jnp.zeros(s.shape, s.dtype) for s in shapes])) if shapes else []

    @cached_property
    def backward_weight(self) -> Callable[[Any, Arrays, Any], Any]:
        """weights, saved, sums -> the sums including this microbatch's gradients."""

        def backward_weight(weights: Any, saved: Arrays, sums: Any) -> Any:
            return _accumulate(sums, self.stage.backward_weight(_first_row(weights), saved))

        return jax.jit(backward_weight, donate_argnums=2, out_shardings=self.weight_shardings)

    @cached_property
    def enter_backward(self) -> Callable[[Ends, Any, Arrays, Ends], Ends]:
        """ends, input, dx, sums -> the sums including this microbatch's gradients of `first_fn`."""

        def enter_backward(ends: Ends, inputs: Any, dx: Arrays, sums: Ends) -> Ends:
            return jax.tree.map(jnp.add, sums, self.model.enter_backward(self.stage.activation_tree, ends, inputs, dx))

        return jax.jit(enter_backward, donate_argnums=3)


ProgramTable = list[list[DevicePrograms]]
"""[device][slice]."""


class PipelineStep:
    """One training step over the devices of a mesh."""

    def __init__(
        self, model: Model, schedule: Schedule, stage_meshes: StageMeshes, stages: Any, ends: Ends, inputs: Slices
    ):
        self.model, self.schedule, self.stage_meshes = model, schedule, stage_meshes
        self.order = dispatch_order(schedule)
        self.program_table = trace_programs(
            model, stage_meshes, stages, ends, inputs, microbatches=schedule.microbatches
        )

    def __call__(self, stages: Any, ends: Ends, inputs: Slices, targets: Slices) -> tuple[jax.Array, Any, Ends]:
        """The loss, and the gradients with the shardings of the parameters."""
        run = _SynchronousRun(self.model, self.stage_meshes, self.program_table, inputs, targets)
        run.begin(stages, ends)
        for located in self.order:
            run.dispatch(located)
        return run.results()


class BufferKeys(NamedTuple):
    """Keys of the buffers that a task shares with others."""

    weights: Any
    ends: Any
    sums: Any
    end_sums: Any
    loss: Any


class ScheduleRun:
    """The buffers of a run, each freed after its last use.

    Subclasses fill in the weights and gradient sums, under the keys that `buffer_keys` returns.
    """

    def __init__(
        self, model: Model, stage_meshes: StageMeshes, program_table: ProgramTable, inputs: Slices, targets: Slices
    ):
        self.model, self.stage_meshes, self.program_table = model, stage_meshes, program_table
        self.last, self.last_slice = stage_meshes.schedule.stages - 1, stage_meshes.schedule.slices - 1
        activation_tree = ActivationTree.of(model.context)
        self.contexts = {
            device: activation_tree.flatten(stage_meshes.local_replica(model.context, device))
            for device in range(stage_meshes.schedule.devices)
        }
        self.inputs = {device: stage_meshes.units(inputs, device) for device in stage_meshes.devices_of(0)}
        self.targets = {device: stage_meshes.units(targets, device) for device in stage_meshes.devices_of(self.last)}
        self.buffers: dict[tuple[str, int, int], Any] = {}
        self.weights: dict[Any, Any] = {}
        self.ends: dict[Any, Ends] = {}
        self.sums: dict[Any, Any] = {}
        self.end_sums: dict[Any, Ends] = {}
        self.losses: dict[Any, jax.Array] = {}

    def buffer_keys(self, task: Task, device: int) -> BufferKeys:
        """Keys of the buffers that a task shares with others."""
        raise NotImplementedError

    def programs(self, device: int, part: int = 0) -> DevicePrograms:
        return self.program_table[device][part]

    def dispatch(self, located: Located) -> None:
        """Dispatches a task and the transfer of its result."""
        task, device = located.task, located.device
        run = {
            "forward": self.forward,
            "backward": self.backward,
            "backward-input": self.backward_input,
            "backward-weight": self.backward_weight,
        }
        run[task.kind](task, device, self.programs(device, task.slice))

    def forward(self, task: Task, device: int, programs: DevicePrograms) -> None:
        stage, unit, keys = task.stage, self.unit(task), self.buffer_keys(task, device)
        if stage == 0:
            x = programs.run(programs.enter, self.ends[keys.ends], self.inputs[device][unit])
        else:
            x = self.buffers.pop(("input", stage, unit))
        context = self.buffers.pop(("context", stage, unit)) if task.slice else self.contexts[device]
        found = programs.run(programs.forward, self.weights[keys.weights], x, context)
        y, after, self.buffers["residual", stage, unit] = found
        if task.slice < self.last_slice:
            self.buffers["context", stage, unit + 1] = after
        if stage < self.last:
            self.buffers["input", stage + 1, unit] = self.stage_meshes.transfer(
                y, self.stage_meshes.device_of(stage + 1, unit), device
            )
            return
        sums = self.losses[keys.loss], self.end_sums[keys.end_sums]
        found = programs.run(programs.loss, self.ends[keys.ends], y, self.targets[device][unit], *sums)
        self.losses[keys.loss], self.end_sums[keys.end_sums], self.buffers["gradient", stage, unit] = found

    def backward(self, task: Task, device: int, programs: DevicePrograms) -> None:
        keys = self.buffer_keys(task, device)
        args = self.weights[keys.weights], *self.backward_operands(task, programs), self.sums[keys.sums]
        if task.stage == 0 and self.model.first_fn is None:
            self.sums[keys.sums], before = programs.run(programs.backward_end, *args)
        else:
            self.sums[keys.sums], dx, before = programs.run(programs.backward, *args)
            self.send_input_gradient(task, device, programs, dx)
        self.store_context_gradient(task, before)

    def backward_input(self, task: Task, device: int, programs: DevicePrograms) -> None:
        args = self.weights[self.buffer_keys(task, device).weights], *self.backward_operands(task, programs)
        dx, before, self.buffers["saved", task.stage, self.unit(task)] = programs.run(programs.backward_input, *args)
        self.send_input_gradient(task, device, programs, dx)
        self.store_context_gradient(task, before)

    def backward_weight(self, task: Task, device: int, programs: DevicePrograms) -> None:
        keys = self.buffer_keys(task, device)
        saved = self.buffers.pop(("saved", task.stage, self.unit(task)))
        sums = self.sums[keys.sums]
        self.sums[keys.sums] = programs.run(programs.backward_weight, self.weights[keys.weights], saved, sums)

    def unit(self, task: Task) -> int:
        return self.stage_meshes.schedule.unit(task)

    def backward_operands(self, task: Task, programs: DevicePrograms) -> tuple[Arrays, Arrays, Arrays]:
        """Operands of a backward: residuals, the output's gradient, and that of the next slice's context."""
        at = task.stage, self.unit(task)
        after = (
            programs.zero_context_gradient
            if task.slice == self.last_slice
            else self.buffers.pop(("context gradient", *at))
        )
        return self.buffers.pop(("residual", *at)), self.buffers.pop(("gradient", *at)), after

    def store_context_gradient(self, task: Task, before: Arrays) -> None:
        """Stores the gradient of the context for the previous slice."""
        if task.slice:
            self.buffers["context gradient", task.stage, self.unit(task) - 1] = before

    def send_input_gradient(self, task: Task, device: int, programs: DevicePrograms, dx: Arrays) -> None:
        stage, unit = task.stage, self.unit(task)
        if stage > 0:
            self.buffers["gradient", stage - 1, unit] = self.stage_meshes.transfer(
                dx, self.stage_meshes.device_of(stage - 1, unit), device
            )
        elif self.model.first_fn is not None:
            keys = self.buffer_keys(task, device)
            args = self.ends[keys.ends], self.inputs[device][unit], dx, self.end_sums[keys.end_sums]
            self.end_sums[keys.end_sums] = programs.run(programs.enter_backward, *args)


class _SynchronousRun(ScheduleRun):
    """A synchronous run: all tasks use the same weights, and all gradients are summed."""

    def begin(self, stages: Any, ends: Ends) -> None:
        """Places weights, ends and zero gradients on the devices that use them."""
        self.stages_like, self.ends_like = stages, ends
        self.weights.update(self.stage_meshes.stage_params(stages))
        outer = {*self.stage_meshes.devices_of(0), *self.stage_meshes.devices_of(self.last)}
        self.ends.update({device: self.stage_meshes.local_replica(ends, device) for device in outer})
        for device, stage in self.stage_meshes.placements:
            self.sums[device, stage] = self.programs(device).zeros(self.weights[device, stage])
        self.end_sums.update({device: self.programs(device).zeros(self.ends[device]) for device in outer})
        self.losses.update(
            {device: self.stage_meshes.zero(device) for device in self.stage_meshes.devices_of(self.last)}
        )

    def buffer_keys(self, task: Task, device: int) -> BufferKeys:
        """By device and stage."""
        at = device, task.stage
        return BufferKeys(weights=at, ends=device, sums=at, end_sums=device, loss=device)

    def results(self) -> tuple[jax.Array, Any, Ends]:
        """The loss and all gradients, combined."""
        loss = self.stage_meshes.total_loss(self.losses)
        stages = self.stage_meshes.stack_stages(self.sums, self.stages_like)
        return loss, stages, self.stage_meshes.sum_ends(self.end_sums, self.ends_like)


def trace_programs(
    model: Model, stage_meshes: StageMeshes, stages: Any, ends: Ends, inputs: Slices, *, microbatches: int
) -> ProgramTable:
    """The programs of each position on the pipeline axis and each slice, common to slices of one shape.

    Gradients are of the loss divided by `microbatches`.
    """
    weights = jax.eval_shape(lambda stages: _at(stages, 0), stages)
    shardings = stage_meshes.stage_shardings(stages)
    found = []
    for device, mesh in enumerate(stage_meshes.meshes):
        own: dict[Any, DevicePrograms] = {}
        keys = []
        context = jax.eval_shape(lambda: model.context)
        for part in inputs:
            x = jax.eval_shape(lambda ends, part: model.enter(ends, _at(part, 0)), ends, part)
            key = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((x, context)))
            if key not in own:
                with jax.set_mesh(mesh):
                    stage = trace_stage(model.stage, weights, x, context)
                own[key] = DevicePrograms(
                    model=model, microbatches=microbatches, mesh=mesh, stage=stage, weight_shardings=shardings[device]
                )
            keys.append(key)
            if context is not None:
                context = jax.eval_shape(model.stage_fn, weights, x, context)[1]
        found.append([own[key] for key in keys])
    return found


def dispatch_order(schedule: Schedule) -> tuple[Located, ...]:
    """All tasks in topological order, interleaving the devices tick by tick."""
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


def _first_row(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _accumulate(sums: Any, more: Any) -> Any:
    return jax.tree.map(lambda total, one: total + one[None], sums, more)
