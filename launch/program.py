"""The functions of a run, completed over a mesh and ready to be called there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import sharding
from sharding import P

from ..models import layouts
from .task import Measured, Task, TrainState


@dataclass(frozen=True, kw_only=True)
class Program:
    """The jitted functions of a task on one mesh, with what it takes to call them."""

    task: Task
    mesh: Mesh
    batch_spec: P
    completion: Any
    train_step: Callable[[TrainState, jax.Array], tuple[TrainState, Measured]]
    evaluate: Callable[[Any, jax.Array], jax.Array]
    generate: Callable[[Any, jax.Array, jax.Array], jax.Array]

    def put(self, tokens: np.ndarray) -> jax.Array:
        """A batch on the devices."""
        return sharding.put(tokens, self.batch_spec)

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
    step = sharding.jit(task.train_step, in_shardings=(None, spec), donate_argnums=(0,))
    return Program(
        task=task,
        mesh=mesh,
        batch_spec=spec,
        completion=step.complete(task.state_shapes, task.batch_shapes(batch_size)),
        train_step=step,
        evaluate=sharding.jit(task.evaluate, in_shardings=(None, spec)),
        generate=sharding.jit(task.generate, in_shardings=(None, spec, None)),
    )
