"""`sharding explain`: the shardings of a train step over a mesh, and their reasons. Needs no devices, runs nothing."""

import math
from typing import Any

import jax

import sharding
from sharding import cost, hardware
from sharding.errors import ShardingError
from sharding.explain import Fit, Verification
from sharding.explain.memory_fit import fit

from .. import jitted_workload, memory_budget, workloads
from ..config.byte_size import parse_bytes
from ..config.explain_config import Explain
from ..config.mesh_config import batch_parts, check_batch, parse_mesh
from ..config.optimizer_config import Optimization
from ..job_memory import JobMemory, job_memory
from ..workload import Shapes, Workload

MIN_EXAMPLES = 16
"""Minimum default batch size."""


def run(config: Explain) -> None:
    """Print and write what `config` asks for."""
    model, fitted = _within_memory(config)
    if fitted is not None:
        print(fitted)
    completion, facts = compile_ahead(config, model, config.aot) if config.aot else (complete(config, model), ())
    if config.check is not None:
        sharding.check_lock(completion, config.check)
        print(f"matches {config.check}")
    if config.lock is not None:
        completion.lock(config.lock)
        print(f"written to {config.lock}")
    job = whole_job(config, model) if config.job else None
    if config.report is not None:
        completion.report(config.report, tables=() if job is None else job.tables())
        print(f"written to {config.report}")
    if config.why is not None:
        print(completion.why(config.why))
    if config.communication:
        print(completion.communication())
    if config.memory:
        print(completion.memory())
    if job is not None:
        print(job)
    if config.suggest:
        print(completion.suggest())
    for fact in facts:
        print(fact)
    files = config.check or config.lock or config.report
    tables = config.communication or config.memory or config.job or config.suggest
    if not (fitted is not None or files or config.why or tables or facts):
        print(completion)


def complete(config: Explain, model: Any = None) -> Any:
    """The completion of the train step of a model, by default that of `config`, over its mesh on described devices."""
    over = _described(config)
    step, workload, batch = _step(config, model, over.mesh)
    with over:
        return step.complete(jitted_workload.state_shapes(workload), batch)


def whole_job(config: Explain, model: Any = None) -> JobMemory:
    """The memory of the job that trains a model, by default that of `config`, phase by phase."""
    over = _described(config)
    _, workload, batch = _step(config, model, over.mesh)
    batch_size = jax.tree.leaves(batch)[0].shape[0]
    budget = None if config.memory_budget is None else parse_bytes("--memory-budget", config.memory_budget)
    with over:
        jitted = jitted_workload.jit_workload(workload, over.mesh, batch_size=batch_size)
        chip = None if over.described is None else over.described.chip
        name = chip.name if chip is not None and chip.memory_bytes is not None else None
        return job_memory(jitted, batch_size=batch_size, chip=name, budget_bytes=budget)


def compile_ahead(config: Explain, model: Any, devices: str) -> tuple[Any, tuple[Verification, Fit]]:
    """The completion, its predictions compared with the step compiled ahead of time, and whether it fits in memory.

    XLA:TPU rejects a step that exceeds its chip's memory; XLA:GPU compiles it anyway.
    """
    over = sharding.mesh(_axes(config), devices=cost.compile_only(devices))
    # Before entering the mesh, whose devices can't run anything.
    step, workload, batch = _step(config, model, over.mesh)
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


def _within_memory(config: Explain) -> tuple[Any, Any]:
    """The configuration of the model, and what was chosen to fit in memory, if it was asked for."""
    _, model = workloads.find(config.model)
    if config.memory_budget is None:
        return model, None
    over = _described(config)
    memory_budget.check(
        config.model.name,
        model,
        _optimization(config, dict(over.mesh.shape)),
        f"--memory-budget {config.memory_budget}",
    )
    with over:
        memory_bytes = parse_bytes("--memory-budget", config.memory_budget)

        def step_of(model: Any) -> memory_budget.Step:
            step, workload, batch = _step(config, model, over.mesh)
            return step, (jitted_workload.state_shapes(workload), batch)

        return memory_budget.fit(model, step_of, memory_bytes)


def _described(config: Explain) -> Any:
    """The mesh on described devices; without a description on generic ones, as many as it needs."""
    axes = _axes(config)
    return sharding.mesh(axes, devices=config.devices or config.aot or math.prod(max(n, 1) for n in axes.values()))


def _optimization(config: Explain, sizes: dict[str, int]) -> Optimization:
    pipeline_config = config.pipeline.resolve(sizes)
    return Optimization(
        pipeline=pipeline_config,
        sequence=config.sequence.resolve(sizes, pipeline_config),
        zero=config.zero,
        offload=config.offload,
        sequence_parallel=config.sequence_parallel,
    )


def _axes(config: Explain) -> dict[str, int]:
    return workloads.with_required_axes(parse_mesh(config.mesh), workloads.find(config.model)[0])


def _step(config: Explain, model: Any, mesh: Any) -> tuple[Any, Workload, Shapes]:
    """The train step of a model for a mesh, its workload, and an abstract batch."""
    family, default = workloads.find(config.model)
    model = default if model is None else model
    sizes = dict(mesh.shape)
    workloads.check_experts(config.model.name, model, sizes)
    optimization = _optimization(config, sizes)
    pipeline_config = optimization.pipeline
    workloads.check_sequence_axis(config.model.name, family, optimization.sequence)
    workloads.check_sequence_parallel(config.model.name, family, model, optimization, sizes)
    sample = family.recipe(config.model.name).sample
    workload = family.build(config.model.name, model, optimization, steps=1000, seed=0, sample=sample)
    parts = batch_parts(sizes) * (1 if pipeline_config is None else pipeline_config.microbatches)
    batch = config.batch or parts * math.ceil(MIN_EXAMPLES / parts)
    check_batch(batch, sizes, pipeline=pipeline_config)
    return jitted_workload.jit_step(workload, mesh), workload, workload.batch_shapes(batch)
