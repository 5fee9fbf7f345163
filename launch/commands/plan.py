"""`sharding plan`: find a mesh and annotations for a train step. Needs no devices, runs nothing."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console

import sharding
from sharding import ShardingError, hardware, planner
from sharding.planner.graph_problem import MICRO

from .. import memory_budget, workloads
from ..config.optimizer_config import Optimization
from ..config.pipeline_config import PipelineConfig
from ..config.plan_config import Plan
from ..jitted_workload import planned_step

SCHEDULES = ("1f1b", "interleaved")
"""Of the stages that are tried."""


def run(config: Plan) -> None:
    """Print and write what `config` asks for."""
    step, args = train_step(config)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with console.status(f"planning for {config.devices}"):
        found = sharding.plan(
            step,
            *args,
            devices=config.devices,
            mesh=config.axes,
            algorithm=config.algorithm,
            memory_bytes=config.memory_bytes,
            seconds=config.seconds,
            seed=config.seed,
            on_progress=console.print,
            staged=list(staged_steps(config)) if config.pipeline else (),
        )
    print(found)
    if config.code:
        print(found.code())
    if found.stages is not None:
        step, args = train_step(config, PipelineConfig.of(found.stages))
    if config.compare or config.frontier is not None:
        problem = planner.problem_of(step, *args, devices=config.devices, mesh=found.axes).problem
        limit = found.memory_bytes if found.memory_bytes >= problem.least_peak_bytes else math.inf
        if config.compare:
            print(planner.compare(problem, memory_bytes=limit, seconds=config.seconds / 4, seed=config.seed))
            print(f"costs are microseconds; the step as completed takes {found.costs.seconds * MICRO:,.0f}")
        if config.frontier is not None:
            curve = planner.memory_curve(problem, algorithm=config.algorithm, seconds=config.seconds)
            curve.plot("microseconds").save(config.frontier)
            print(f"written to {config.frontier}")
    if config.report is not None:
        with found.mesh(config.devices):
            completion = step.with_plan(found).complete(*args)
        completion.report(config.report, tables=found.tables())
        print(f"written to {config.report}")
    if config.out is not None:
        print(f"written to {found.save(config.out)}")


def train_step(config: Plan, pipeline: PipelineConfig | None = None) -> tuple[Any, tuple[Any, Any]]:
    """The train step of a model, without a layout, and its abstract arguments."""
    family, model = workloads.find(config.model)
    workloads.check_experts(config.model.name, model, {})
    if pipeline is None:
        model = memory_budget.automatic(model)
    workload = family.build(config.model.name, model, Optimization(pipeline=pipeline), steps=1000, seed=0)
    return planned_step(workload), (workload.state_shapes, workload.batch_shapes(config.batch))


def staged_steps(config: Plan) -> Iterator[planner.Staged]:
    """The step in as many stages as the devices allow, for a model that has stages."""
    num_devices = hardware.parse(config.devices).num_devices
    counts = [count for count in range(2, num_devices + 1) if num_devices % count == 0]
    for count, schedule in itertools.product(counts, SCHEDULES):
        microbatches = max((m for m in (4 * count, 2 * count, count) if config.batch % m == 0), default=None)
        if microbatches is None:
            continue
        stages = planner.Stages(count=count, schedule=schedule, microbatches=microbatches)
        with contextlib.suppress(ShardingError):  # the model's layers don't make as many stages
            step, args = train_step(config, PipelineConfig.of(stages))
            yield planner.Staged(step=step, args=args, stages=stages)
