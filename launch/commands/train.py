"""`sharding train`: propagate shardings through the train step, then run it."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

import sharding
from sharding import ShardingError, checkpoint
from sharding.distributed import consistency, processes
from sharding.planner import Plan

from .. import device_setup, jitted_workload, memory_budget, run_folder, text, workloads
from ..config.byte_size import parse_bytes
from ..config.mesh_config import check_batch, parse_mesh
from ..config.optimizer_config import check_zero
from ..config.pipeline_config import PipelineConfig
from ..config.train_config import Train, as_json
from ..stop_signals import StopRequest
from ..training_loop import TrainingLoop
from ..workload import Batch, DataSource, Workload


def run(config: Train) -> None:
    """Train as `config` says, and write metrics, checkpoints, loss curve and report to its folder.

    With several processes, process 0 writes; the folder must be shared by all hosts. A run stopped by Ctrl-C, SIGTERM
    or a crash resumes with `--resume` from its newest checkpoint, also on another mesh.
    """
    sharding.initialize()
    with StopRequest() as stop, run_folder.disk_errors(config.out):
        _run(config, stop)


def _run(config: Train, stop: StopRequest) -> None:
    family, model = workloads.find(config.model)
    recipe = config.applied_to(family.recipe(config.model.name))
    if config.text.is_given:
        workloads.check_text(config.model.name, family)
    plan = None if config.plan is None else Plan.load(config.plan)
    asked = parse_mesh(config.mesh) if plan is None else dict(plan.axes)
    axes = device_setup.set_up_devices(asked, num_devices=config.devices)
    config = _resume_on_restart(config)
    axes = workloads.with_required_axes(axes, family)
    workloads.check_experts(config.model.name, model, axes)
    accumulate = recipe.optimization.accumulate
    if plan is not None and plan.stages is not None:
        pipeline_config = PipelineConfig.of(plan.stages)
    else:
        pipeline_config = config.pipeline.resolve(axes, accumulate)
    check_batch(recipe.batch, axes, accumulate, pipeline_config)
    options = recipe.optimization
    check_zero(options.zero, axes, offload=options.offload, delay_after=options.delay_after)
    sequence_config = config.sequence.resolve(axes, pipeline_config)
    workloads.check_sequence_axis(config.model.name, family, sequence_config)
    optimization = replace(recipe.optimization, pipeline=pipeline_config, sequence=sequence_config)
    tokenized = text.read(config.text) if config.text.is_given else None
    model = text.resize_vocab(model, tokenized) if tokenized else model
    workloads.check_sequence_parallel(config.model.name, family, model, optimization, axes)
    devices = jax.devices()[: math.prod(axes.values())]

    def build(model: Any) -> Workload:
        options = {"steps": recipe.steps, "seed": config.seed, "sample": recipe.sample}
        return family.build(config.model.name, model, optimization, **options)

    step = None
    if config.memory is not None:
        memory_budget.check(config.model.name, model, optimization, f"--memory {config.memory}")
        with sharding.mesh(axes, devices=devices) as mesh:
            model, step = _within_memory(config.memory, model, lambda model: _step(build(model), mesh, recipe.batch))
    if plan is not None:
        model = memory_budget.as_planned(model, plan)
    workload = build(model)
    workloads.check_accumulation(workload, accumulate)
    if recipe.sample and not workload.sampler:
        raise ShardingError(
            f"--model {workload.name} --sample {recipe.sample}",
            found="this model is not generative",
            required="a generative model to sample from",
            fix="--sample 0",
        )
    if processes.index() == 0:
        run_folder.make(config.out)
    if tokenized:
        workload = text.use_text(workload, tokenized, batch_size=recipe.batch, seed=config.seed)
    source = workload.source(recipe.batch, config.seed)
    settings = as_json(config) | as_json(recipe)
    settings |= {"model_config": as_json(model), f"{source.name}_sha256": source.sha256}
    if processes.index() == 0 and config.resume:
        run_folder.check_resumable(config.out, settings, config.resume_step)
    elif processes.index() == 0:
        run_folder.move_aside(config.out)
    processes.barrier("folder")
    with sharding.mesh(axes, devices=devices) as mesh:
        assert isinstance(mesh, jax.sharding.Mesh)
        _check_processes_agree(settings, source, mesh)
        loop = TrainingLoop(
            config=config,
            recipe=recipe,
            settings=settings,
            source=source,
            axes=axes,
            stop=stop,
            jitted=jitted_workload.jit_workload(workload, mesh, batch_size=recipe.batch, plan=plan, step=step),
        )
        loop.run()


def _step(workload: Workload, mesh: Any, batch_size: int) -> memory_budget.Step:
    return jitted_workload.jit_step(workload, mesh), (
        jitted_workload.state_shapes(workload),
        workload.batch_shapes(batch_size),
    )


def _within_memory(memory: str, model: Any, step: Callable[[Any], memory_budget.Step]) -> tuple[Any, Any]:
    """The model whose step fits in memory, and that step, compiled; process 0 says what it keeps."""
    model, fitted = memory_budget.fit(model, step, parse_bytes("--memory", memory))
    if processes.index() == 0:
        print(fitted)
    return model, fitted.step


def _resume_on_restart(config: Train) -> Train:
    """`config`, resuming from the newest checkpoint if a launcher restarted this process."""
    if not int(os.environ.get(processes.RESTART, 0)):
        return config
    has_checkpoint = checkpoint.latest_step(config.out / run_folder.CHECKPOINTS) is not None
    first = processes.all_gather_text("resume", str(has_checkpoint))[0]
    return replace(config, resume=True, resume_step=None) if first == str(True) else config


def _check_processes_agree(settings: dict[str, Any], source: DataSource, mesh: jax.sharding.Mesh) -> None:
    """Raise an error if processes differ in settings, mesh or data order."""
    if processes.count() == 1:
        return
    facts = {
        "settings": json.dumps(settings, indent=0, sort_keys=True, default=str),
        "mesh": "\n".join(f"{device.process_index}: device {device.id}" for device in mesh.devices.flat),
        "data order": "\n".join(_digest(source.train_batch(step)) for step in (0, 1)),
    }
    consistency.agree(facts, about="train")


def _digest(batch: Batch) -> str:
    parts = [np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(batch)]
    return hashlib.sha256(b"".join(parts)).hexdigest()
