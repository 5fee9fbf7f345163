"""`sharding explain`: the shardings of a train step over a mesh, and their reasons. Needs no devices, runs nothing."""

import math
from typing import Any

import jax

import sharding
from sharding import cost, hardware
from sharding.errors import ShardingError
from sharding.explain import Fit, Verification
from sharding.explain.memory_fit import fit

from ...models import layouts
from .. import jitted_workload, workloads
from ..config.explain_config import Explain
from ..config.mesh_config import batch_parts, check_batch, parse_mesh
from ..config.optimizer_config import Optimization
from ..workload import Shapes, Workload

MIN_EXAMPLES = 16
"""Minimum default batch size."""


def run(config: Explain) -> None:
    """Print and write what `config` asks for."""
    completion, facts = compile_ahead(config, config.aot) if config.aot is not None else (complete(config), ())
    if config.check is not None:
        sharding.check_lock(completion, config.check)
        print(f"matches {config.check}")
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
    if config.suggest:
        print(completion.suggest())
    for fact in facts:
        print(fact)
    files = config.check or config.lock or config.report
    shown = files or config.why or config.communication or config.memory or config.suggest
    if not (shown or facts):
        print(completion)


def complete(config: Explain) -> Any:
    """The completion of the train step over the mesh of `config`, on described devices."""
    axes = _axes(config)
    # Without a description: generic devices, as many as the mesh needs.
    devices = config.devices or math.prod(max(size, 1) for size in axes.values())
    over = sharding.mesh(axes, devices=devices)
    step, workload, batch = _step(config, over.mesh)
    with over:
        return step.complete(jitted_workload.state_shapes(workload), batch)


def compile_ahead(config: Explain, devices: str) -> tuple[Any, tuple[Verification, Fit]]:
    """The completion, its predictions compared with the step compiled ahead of time, and whether it fits in memory.

    XLA:TPU rejects a step that exceeds its chip's memory; XLA:GPU compiles it anyway.
    """
    over = sharding.mesh(_axes(config), devices=cost.compile_only(devices))
    step, workload, batch = _step(config, over.mesh)  # before entering the mesh, whose devices can't run anything
    with over:
        args = jitted_workload.state_shapes(workload), batch
        completion = step.complete(*args)
        try:
            found = completion.verify(step.lower(*args).compile())
        except jax.errors.JaxRuntimeError as error:
            raise ShardingError(
                f"{completion.name} compiled for {devices}",
                found=[*str(error).splitlines()[:3], f"predicted peak: {completion.memory().peak_bytes:,} bytes"],
                required="a step that compiles and fits in device memory",
                fix=["--memory without --aot, for peak memory by category", "--remat", "a larger mesh"],
            ) from error
    chip = hardware.parse(devices).chip.name
    return completion, (found, fit(found.compiled_peak_bytes, chip))


def _axes(config: Explain) -> dict[str, int]:
    return workloads.with_required_axes(parse_mesh(config.mesh), workloads.find(config.model)[0])


def _step(config: Explain, mesh: Any) -> tuple[Any, Workload, Shapes]:
    """The train step of `config` for a mesh, its workload, and an abstract batch."""
    family, model = workloads.find(config.model)
    sizes = dict(mesh.shape)
    workloads.check_experts(config.model.name, model, sizes)
    pipeline_config = config.pipeline.resolve(sizes)
    sequence_config = config.sequence.resolve(sizes, pipeline_config)
    workloads.check_sequence_axis(config.model.name, family, sequence_config)
    optimization = Optimization(
        pipeline=pipeline_config,
        sequence=sequence_config,
        zero=config.zero,
        offload=config.offload,
        sequence_parallel=config.sequence_parallel,
    )
    workloads.check_sequence_parallel(config.model.name, family, model, optimization, sizes)
    workload = family.build(config.model.name, model, optimization, steps=1000, seed=0)
    parts = batch_parts(sizes) * (1 if pipeline_config is None else pipeline_config.microbatches)
    batch = config.batch or parts * math.ceil(MIN_EXAMPLES / parts)
    check_batch(batch, sizes, pipeline=pipeline_config)
    step = sharding.jit(workload.train_step, in_shardings=(None, layouts.batch(mesh.axis_names)), donate_argnums=(0,))
    return step, workload, workload.batch_shapes(batch)
