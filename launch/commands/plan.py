"""`sharding plan`: find a mesh and annotations for a train step. Needs no devices, runs nothing."""

import math
from typing import Any

from rich.console import Console

import sharding
from sharding import planner
from sharding.planner.graph_problem import MICRO

from .. import memory_budget, workloads
from ..config.optimizer_config import Optimization
from ..config.plan_config import Plan
from ..jitted_workload import planned_step


def run(config: Plan) -> None:
    """Print and write what `config` asks for."""
    step, args = _step(config)
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
        )
    print(found)
    if config.code:
        print(found.code())
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
    if config.out is not None:
        print(f"written to {found.save(config.out)}")


def _step(config: Plan) -> tuple[Any, tuple[Any, Any]]:
    """The train step of a model, without a layout, and its abstract arguments."""
    family, model = workloads.find(config.model)
    workloads.check_experts(config.model.name, model, {})
    model = memory_budget.automatic(model)
    workload = family.build(config.model.name, model, Optimization(), steps=1000, seed=0)
    return planned_step(workload), (workload.state_shapes, workload.batch_shapes(config.batch))
