"""The functions of a workload, jitted for a mesh."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

import sharding
from sharding import P
from sharding.distributed import heartbeat
from sharding.jit import nonfinite
from sharding.planner import Plan
from sharding.spec import num_parts

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
    mesh: Mesh | AbstractMesh
    batch_spec: P
    plan: Plan | None
    """That the train step follows."""
    completion: Any
    init: Any
    """key -> the initial state, created with the inferred shardings; jitted."""
    train_step: Callable[[TrainState, Batch], tuple[TrainState, DeviceMetrics]]
    evaluate: Any
    """params, variables, batch -> the inputs of `Workload.score`, jitted."""
    generate: Any
    """params, prompts, key -> prompts with their continuations, jitted; None for a model that generates no text."""

    @property
    def num_batch_shards(self) -> int:
        """Parts into which the mesh splits the examples of a batch."""
        axes = self.batch_spec[0] if self.batch_spec else ()
        return num_parts([axes] if isinstance(axes, str) else axes or (), self.mesh.shape)

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

    def sample(self, state: TrainState, *, seed: int) -> str:
        """The text generated for the first of as many equal prompts as a batch has shards."""
        sampler = self.workload.sampler
        if sampler is None or self.generate is None:
            return ""
        rows = np.tile(sampler.prompt, (self.num_batch_shards, 1))
        tokens = self.generate(state.params, self.put_global(rows), jax.random.key(seed))
        return sampler.decode(np.asarray(tokens)[0])

    def origins(self, state: TrainState, batch: Batch) -> list[str]:
        """The first non-finite values in a step from this state with this batch, both on the devices."""
        return [str(origin) for origin in nonfinite.origins(self.workload.train_step, state, batch, names=NAMES)]

    def initial_state(self, seed: int) -> TrainState:
        """The initial state, created with the inferred shardings."""
        return self.init(jax.random.key(seed))

    def placed(self, batch: Any) -> Any:
        """An abstract batch with the sharding that `put` gives it."""
        return jax.tree.map(lambda leaf: self._with_sharding(leaf, self.batch_spec), batch)

    def abstract_state(self) -> TrainState:
        """The state as ShapeDtypeStructs with shardings, to restore into."""

        return jax.tree.map(self._with_sharding, self.workload.state_shapes, self.completion.in_shardings[0])

    def _with_sharding(self, leaf: jax.ShapeDtypeStruct, spec: P | NamedSharding) -> jax.ShapeDtypeStruct:
        spec, kind = (spec.spec, spec.memory_kind) if isinstance(spec, NamedSharding) else (spec, None)
        found = NamedSharding(self.mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=found)


def state_shapes(workload: Workload) -> TrainState:
    """The abstract state for the mesh in context; arrays in the host's memory have their initial shardings."""
    key = abstract_key()
    program, shapes = jax.make_jaxpr(workload.init, return_shape=True)(key)
    leaves, tree = jax.tree.flatten(shapes)
    on_host = [aval.memory_space == jax.memory.Space.Host for aval in program.out_avals]
    if not any(on_host):
        return tree.unflatten(leaves)
    placed = jax.tree.leaves(sharding.jit(workload.init).eval_shape(key))
    return tree.unflatten([p if there else leaf for leaf, p, there in zip(leaves, placed, on_host, strict=True)])


def abstract_key() -> jax.ShapeDtypeStruct:
    """A random key, abstract."""
    return jax.eval_shape(lambda: jax.random.key(0))


def jit_step(workload: Workload, mesh: Mesh | AbstractMesh) -> Any:
    """The jitted train step."""
    spec = layouts.batch(mesh.axis_names)
    return sharding.jit(skip_nonfinite(workload.train_step), in_shardings=(None, spec), donate_argnums=(0,))


def planned_step(workload: Workload, plan: Plan | None = None) -> Any:
    """The train step of `workload` as `sharding.plan` found it, or to plan."""
    return sharding.jit(skip_nonfinite(workload.train_step), donate_argnums=(0,), plan=plan)


def jit_workload(
    workload: Workload, mesh: Mesh | AbstractMesh, *, batch_size: int, plan: Plan | None = None, step: Any = None
) -> JittedWorkload:
    """`workload` jitted for `mesh`, which must be the mesh in context; nothing compiles here.

    Args:
        workload: the model with its data and recipe.
        mesh: in context.
        batch_size: examples per step.
        plan: that the train step follows.
        step: its train step, where that is jitted already.
    """
    if plan is None:
        step, spec = step or jit_step(workload, mesh), layouts.batch(mesh.axis_names)
    else:
        step = planned_step(workload, plan)
        batch = [spec for name, spec in plan.arguments if name.partition("/")[0] == NAMES[1]]
        spec = P(*batch[0][:1]) if batch else P()
    # With several processes each needs a full copy of what it reads.
    replicated = P() if jax.process_count() > 1 else None
    generate = workload.sampler and sharding.jit(
        workload.sampler.generate, in_shardings=(None, spec, None), out_shardings=replicated
    )
    mpmd_step = workload.mpmd_step
    completion = step.complete(state_shapes(workload), workload.batch_shapes(batch_size))
    return JittedWorkload(
        workload=workload,
        mesh=mesh,
        batch_spec=spec,
        plan=plan,
        completion=completion,
        init=sharding.jit(workload.init, out_shardings=completion.in_shardings[0]),
        train_step=_jit_mpmd(mpmd_step, spec) if mpmd_step is not None and mpmd_step.suits(mesh) else step,
        evaluate=sharding.jit(workload.evaluate, in_shardings=(None, None, spec), out_shardings=replicated),
        generate=generate,
    )


def skip_nonfinite(step: Step) -> Step:
    """`step`, except that a non-finite loss or gradient leaves the state unchanged but for the step count.

    State in the host's memory is left to the step, which has to leave it unchanged itself.
    """

    @functools.wraps(step)
    def finite_step(state: TrainState, *args: Any) -> tuple[TrainState, DeviceMetrics]:
        new, measured = step(state, *args)
        finite = jnp.isfinite(measured["loss"]) & jnp.isfinite(measured["gradient_norm"])

        def chosen(updated: jax.Array, old: jax.Array) -> jax.Array:
            on_host = jax.typeof(updated).memory_space == jax.memory.Space.Host
            return updated if on_host else jnp.where(finite, updated, old)

        kept = jax.tree.map(chosen, new, state)
        return replace(kept, step=new.step), measured

    return finite_step


def _jit_mpmd(step: MpmdStep, batch_spec: P) -> Callable[[TrainState, Batch], tuple[TrainState, DeviceMetrics]]:
    """The train step as one program before the pipeline, the pipeline's programs, and one for the update."""
    prepare = sharding.jit(step.prepare, in_shardings=(None, batch_spec))
    update = sharding.jit(skip_nonfinite(step.update), donate_argnums=(0,))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, DeviceMetrics]:
        return update(state, *step.gradient(*prepare(state, batch)))

    return train_step
