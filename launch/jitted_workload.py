"""The functions of a workload, jitted for a mesh."""

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
from sharding import P
from sharding.distributed import heartbeat
from sharding.jit import nonfinite

from ..models import layouts
from .batch_rows import select_rows
from .workload import Batch, DeviceMetrics, MpmdStep, TrainState, Workload

NAMES = ("state", "batch")
"""Names of a train step's arguments."""


Step = Callable[..., tuple[TrainState, DeviceMetrics]]


@dataclass(frozen=True, kw_only=True)
class JittedWorkload:
    """The jitted functions of a workload on one mesh, and helpers to call them."""

    workload: Workload
    mesh: Mesh
    batch_spec: P
    completion: Any
    train_step: Callable[[TrainState, Batch], tuple[TrainState, DeviceMetrics]]
    evaluate: Callable[[nnx.State, nnx.State, Batch], DeviceMetrics]
    generate: Callable[[nnx.State, jax.Array, jax.Array], jax.Array] | None

    def local_rows(self, batch_size: int) -> np.ndarray | None:
        """The rows of a batch on this process's devices; None for all, with a single process."""
        if jax.process_count() == 1:
            return None
        shards = NamedSharding(self.mesh, self.batch_spec).addressable_devices_indices_map((batch_size,))
        return np.unique(
            np.concatenate([np.arange(batch_size)[index] for index in shards.values() if index is not None])
        )

    def put(self, batch: Batch) -> Batch:
        """A batch on the devices, from this process's rows."""
        return sharding.put(batch, self.batch_spec)

    def put_global(self, batch: Batch) -> Batch:
        """A batch on the devices, from a copy of the full batch in every process."""
        return self.put(select_rows(batch, self.local_rows(len(jax.tree.leaves(batch)[0]))))

    def heldout(self, state: TrainState, batches: Sequence[Batch]) -> dict[str, float]:
        """The held-out metrics over `batches`, which are on the host."""
        outputs = []
        for batch in batches:
            outputs.append(jax.device_get(self.evaluate(state.params, state.variables, self.put_global(batch))))
            heartbeat.report_working()
        return self.workload.score(outputs)

    def sample(self, state: TrainState, *, seed: int, num_prompts: int) -> str:
        """The text generated for the first of `num_prompts` equal prompts; the mesh must divide `num_prompts`."""
        sampler = self.workload.sampler
        if sampler is None or self.generate is None:
            return ""
        rows = np.tile(sampler.prompt, (num_prompts, 1))
        tokens = self.generate(state.params, self.put_global(rows), jax.random.key(seed))
        return sampler.decode(np.asarray(tokens)[0])

    def origins(self, state: TrainState, batch: Batch) -> list[str]:
        """The first non-finite values in a step from this state with this batch, both on the devices."""
        return [str(origin) for origin in nonfinite.origins(self.workload.train_step, state, batch, names=NAMES)]

    def initial_state(self, seed: int) -> TrainState:
        """The initial state, created with the inferred shardings."""
        init = sharding.jit(self.workload.init, out_shardings=self.completion.in_shardings[0])
        return init(jax.random.key(seed))

    def abstract_state(self) -> TrainState:
        """The state as ShapeDtypeStructs with shardings, to restore into."""
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec)),
            self.workload.state_shapes,
            self.completion.in_shardings[0],
        )


def jit_step(workload: Workload, mesh: Mesh) -> Any:
    """The jitted train step."""
    spec = layouts.batch(mesh.axis_names)
    return sharding.jit(skip_nonfinite(workload.train_step), in_shardings=(None, spec), donate_argnums=(0,))


def jit_workload(workload: Workload, mesh: Mesh, *, batch_size: int) -> JittedWorkload:
    """`workload` jitted for `mesh`, which must be the mesh in context; nothing is compiled yet."""
    spec = layouts.batch(mesh.axis_names)
    step = jit_step(workload, mesh)
    # With several processes each needs a full copy of what it reads.
    replicated = P() if jax.process_count() > 1 else None
    generate = workload.sampler and sharding.jit(
        workload.sampler.generate, in_shardings=(None, spec, None), out_shardings=replicated
    )
    mpmd_step = workload.mpmd_step
    return JittedWorkload(
        workload=workload,
        mesh=mesh,
        batch_spec=spec,
        completion=step.complete(workload.state_shapes, workload.batch_shapes(batch_size)),
        train_step=_jit_mpmd(mpmd_step, spec) if mpmd_step is not None and mpmd_step.suits(mesh) else step,
        evaluate=sharding.jit(workload.evaluate, in_shardings=(None, None, spec), out_shardings=replicated),
        generate=generate,
    )


def skip_nonfinite(step: Step) -> Step:
    """`step`, except that a non-finite loss or gradient leaves the state unchanged but for the step count."""

    @functools.wraps(step)
    def finite_step(state: TrainState, *args: Any) -> tuple[TrainState, DeviceMetrics]:
        new, measured = step(state, *args)
        finite = jnp.isfinite(measured["loss"]) & jnp.isfinite(measured["gradient_norm"])
        kept = jax.tree.map(lambda updated, old: jnp.where(finite, updated, old), new, state)
        return replace(kept, step=new.step), measured

    return finite_step


def _jit_mpmd(step: MpmdStep, batch_spec: P) -> Callable[[TrainState, Batch], tuple[TrainState, DeviceMetrics]]:
    """The train step as one program before the pipeline, the pipeline's programs, and one for the update."""
    prepare = sharding.jit(step.prepare, in_shardings=(None, batch_spec))
    update = sharding.jit(skip_nonfinite(step.update), donate_argnums=(0,))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, DeviceMetrics]:
        return update(state, *step.gradient(*prepare(state, batch)))

    return train_step
