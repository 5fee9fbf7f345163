"""The functions of a run, completed over a mesh and ready to be called there."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

import sharding
from sharding import P, nonfinite, processes

from ..models import layouts
from .rows import taken
from .task import Apart, Batch, Measured, Task, TrainState

NAMES = ("state", "batch")
"""Of a train step's arguments."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The jitted functions of a task on one mesh, with what it takes to call them."""

    task: Task
    mesh: Mesh
    batch_spec: P
    completion: Any
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Measured]]
    evaluate: Callable[[nnx.State, nnx.State, Batch], Measured]
    generate: Callable[[nnx.State, jax.Array, jax.Array], jax.Array] | None

    def rows(self, batch_size: int) -> np.ndarray | None:
        """The rows of a batch that this process's devices need; None for all, where there is one process."""
        if jax.process_count() == 1:
            return None
        parts = NamedSharding(self.mesh, self.batch_spec).addressable_devices_indices_map((batch_size,))
        return np.unique(
            np.concatenate([np.arange(batch_size)[index] for index in parts.values() if index is not None])
        )

    def put(self, batch: Batch) -> Batch:
        """A batch on the devices, of which this process gives its rows."""
        return sharding.put(batch, self.batch_spec)

    def put_whole(self, batch: Batch) -> Batch:
        """A batch on the devices that every process has whole."""
        return self.put(taken(batch, self.rows(len(jax.tree.leaves(batch)[0]))))

    def heldout(self, state: TrainState, batches: Sequence[Batch]) -> dict[str, float]:
        """The held-out figures of the task over `batches`, which are on the host."""
        looked = []
        for batch in batches:
            looked.append(jax.device_get(self.evaluate(state.params, state.variables, self.put_whole(batch))))
            processes.working()
        return self.task.score(looked)

    def sample(self, state: TrainState, *, seed: int, num_prompts: int) -> str:
        """What the first of `num_prompts` equal prompts, which the mesh must divide, goes on to."""
        sampler = self.task.sampler
        if sampler is None or self.generate is None:
            return ""
        rows = np.tile(sampler.prompt, (num_prompts, 1))
        tokens = self.generate(state.params, self.put_whole(rows), jax.random.key(seed))
        return sampler.text(np.asarray(tokens)[0])

    def origins(self, state: TrainState, batch: Batch) -> list[str]:
        """Where the values of a step from this state with this batch, on the devices, stop being finite."""
        return [str(origin) for origin in nonfinite.origins(self.task.train_step, state, batch, names=NAMES)]

    def initial_state(self, seed: int) -> TrainState:
        """The state before the first step, made in the parts that the completion gives."""
        init = sharding.jit(self.task.init, out_shardings=self.completion.in_shardings[0])
        return init(jax.random.key(seed))

    def sharded_shapes(self) -> TrainState:
        """The state as shapes with shardings on the mesh, to restore into."""
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec)),
            self.task.state_shapes,
            self.completion.in_shardings[0],
        )


def over(task: Task, mesh: Mesh, *, batch_size: int) -> Program:
    """The program of `task` on `mesh`, which must be in force; nothing is compiled yet."""
    spec = layouts.batch(mesh.axis_names)
    step = sharding.jit(guarded(task.train_step), in_shardings=(None, spec), donate_argnums=(0,))
    # What several processes look at comes to each of them whole.
    seen = P() if jax.process_count() > 1 else None
    generate = task.sampler and sharding.jit(task.sampler.generate, in_shardings=(None, spec, None), out_shardings=seen)
    return Program(
        task=task,
        mesh=mesh,
        batch_spec=spec,
        completion=step.complete(task.state_shapes, task.batch_shapes(batch_size)),
        train_step=_started_apart(task.apart, spec) if task.apart is not None and task.apart.suits(mesh) else step,
        evaluate=sharding.jit(task.evaluate, in_shardings=(None, None, spec), out_shardings=seen),
        generate=generate,
    )


def guarded(step: Callable[..., tuple[TrainState, Measured]]) -> Callable[..., tuple[TrainState, Measured]]:
    """`step`, but where its loss or gradient is not finite the state stays, with one step more counted."""

    @functools.wraps(step)
    def kept(state: TrainState, *args: Any) -> tuple[TrainState, Measured]:
        new, measured = step(state, *args)
        finite = jnp.isfinite(measured["loss"]) & jnp.isfinite(measured["gradient_norm"])
        either = jax.tree.map(lambda ours, theirs: jnp.where(finite, ours, theirs), new, state)
        return replace(either, step=new.step), measured

    return kept


def _started_apart(apart: Apart, batch_spec: P) -> Callable[[TrainState, Batch], tuple[TrainState, Measured]]:
    """A train step whose pipeline is many programs, between one that cuts and one that updates."""
    cut = sharding.jit(apart.cut, in_shardings=(None, batch_spec))
    update = sharding.jit(guarded(apart.update), donate_argnums=(0,))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Measured]:
        return update(state, *apart.gradient(*cut(state, batch)))

    return train_step
