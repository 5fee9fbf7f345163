"""`sharding explain`: how a train step would be split over a mesh, and why. No device is needed, nothing is run."""

import math
from typing import Any

import jax

import sharding
from sharding import cost, hardware
from sharding.errors import ShardingError
from sharding.explain import Fit, Verification
from sharding.explain.capacity import fit

from ..models import layouts
from . import tasks
from .config import Explain, Optimization, batch_parts, check_batch, parse_mesh

LEAST_EXAMPLES = 16
"""In a batch whose size is not given."""


def run(config: Explain) -> None:
    """Print what `config` asks for."""
    completion, facts = compile_ahead(config, config.aot) if config.aot is not None else (complete(config), ())
    if config.check is not None:
        sharding.check_lock(completion, config.check)
        print(f"as {config.check} says")
    if config.lock is not None:
        completion.lock(config.lock)
        print(f"written to {config.lock}")
    if config.report is not None:
        completion.report(config.report)
        print(f"written to {config.report}")
    if config.why is not None:
        print(completion.why(config.why))
    if config.communication:
        print(completion.communication())
    if config.memory:
        print(completion.memory())
    for fact in facts:
        print(fact)
    shown = config.check or config.lock or config.report or config.why or config.communication or config.memory
    if not (shown or facts):
        print(completion)


def complete(config: Explain) -> Any:
    """The completion of the train step over the mesh of `config`, of real shapes and described devices."""
    axes = _axes(config)
    # Without a description, devices of no particular kind, as many as the mesh needs.
    devices = config.devices or math.prod(max(size, 1) for size in axes.values())
    over = sharding.mesh(axes, devices=devices)
    step, args = _step(config, over.mesh)
    with over:
        return step.complete(*args)


def compile_ahead(config: Explain, devices: str) -> tuple[Any, tuple[Verification, Fit]]:
    """The completion, its figures beside those of the step compiled for devices that aren't there, and whether it fits.

    XLA:TPU refuses a step that doesn't fit its chip, XLA:GPU compiles it all the same.
    """
    over = sharding.mesh(_axes(config), devices=cost.compile_only(devices))
    step, args = _step(config, over.mesh)  # before the mesh is in force: what is computed here can't run there
    with over:
        completion = step.complete(*args)
        try:
            found = completion.verify(step.lower(*args).compile())
        except jax.errors.JaxRuntimeError as error:
            raise ShardingError(
                f"{completion.name} compiled for {devices}",
                there=[*str(error).splitlines()[:3], f"{completion.memory().peak_bytes:,} bytes predicted"],
                must="the compiler takes the step, and a device's memory holds it",
                fix=["--memory, without --aot, to see what fills it", "--remat", "a larger mesh"],
            ) from error
    chip = hardware.parse(devices).chip.name
    return completion, (found, fit(found.compiled_peak_bytes, chip))


def _axes(config: Explain) -> dict[str, int]:
    return tasks.with_own_axes(parse_mesh(config.mesh), tasks.find(config.model)[0])


def _step(config: Explain, mesh: Any) -> tuple[Any, tuple[Any, Any]]:
    """The train step that `config` names for a mesh, and the shapes of its arguments."""
    family, model = tasks.find(config.model)
    sizes = dict(mesh.shape)
    tasks.check_experts(config.model.name, model, sizes)
    pipelining = config.pipeline.over(sizes)
    sequencing = config.sequence.over(sizes, pipelining)
    tasks.check_splits_sequences(config.model.name, family, sequencing)
    optimization = Optimization(
        pipeline=pipelining,
        sequence=sequencing,
        zero=config.zero,
        sequence_parallel=config.sequence_parallel,
    )
    tasks.check_sequence_parallel(config.model.name, family, model, optimization, sizes)
    task = family.build(config.model.name, model, optimization, steps=1000, seed=0)
    parts = batch_parts(sizes) * (1 if pipelining is None else pipelining.microbatches)
    batch = config.batch or parts * math.ceil(LEAST_EXAMPLES / parts)
    check_batch(batch, sizes, pipeline=pipelining)
    step = sharding.jit(task.train_step, in_shardings=(None, layouts.batch(mesh.axis_names)), donate_argnums=(0,))
    return step, (task.state_shapes, task.batch_shapes(batch))
