"""Measured step times of plans, over those of the fastest of thirty sampled ones for the same step and devices.

    python -m tests.benchmarks.sampled_plans                                  # an idle machine: half an hour
    python -m tests.benchmarks.sampled_plans --only gpt lstm --samples 5 --quick
    python -m tests.benchmarks.sampled_plans --json sampled_plans.json

For each model `sharding.plan` finds a mesh of eight virtual CPU devices and annotations, by rates that `cost.calibrate`
measured in the same process. A sampled plan has a random mesh and a random sharding of each argument, equal layers
alike; half of the parameters stay replicated. All are compiled and run in alternation, then the plan and the fastest
three again.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sharding
from sharding import P, cost, planner
from sharding.hardware import Devices
from sharding.spec import sizes_text, to_partition_spec

from . import command_line
from .result_file import Result, measured

sys.path.insert(0, str(Path(__file__).parent.parent))  # as under pytest: `support` is top-level

from support.train_steps import hand_written, small_models
from support.train_steps.step import Step

MODELS = {
    name: {**small_models.STEPS, **hand_written.STEPS}[name]
    for name in (
        "gpt", "bert", "resnet", "vit", "dlrm", "experts", "u-net", "lstm", "fno", "graph net", "gpt, scanned, remat",
        "blockwise attention",
    )
}  # fmt: skip
NUM_DEVICES = 8
MESHES = ({"x": 8}, {"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2})
FINALISTS = 3
CLOSE = 1.1
"""The measured time, relative to the fastest sampled one's, up to which a plan is as good."""


@dataclass(frozen=True)
class Options:
    """The models, the number of plans and runs, and the output file."""

    only: tuple[str, ...] = tuple(MODELS)
    samples: int = 30
    repeats: int = 9
    """Measured steps of the plan and of the fastest sampled ones; the others have a third of them."""
    seed: int = 0
    quick: bool = False
    """Calibrate in seconds."""
    json: Path | None = None
    """Output file of the figures."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The plan of one model, and the fastest sampled one."""

    name: str
    mesh: str
    annotations: int
    estimated_seconds: float
    measured_seconds: float
    best_mesh: str
    best_estimated_seconds: float
    best_seconds: float
    median_seconds: float
    """Of all sampled ones."""

    @property
    def ratio(self) -> float:
        """The plan's time over the fastest sampled one's."""
        return self.measured_seconds / self.best_seconds


class Case:
    """A step with some shardings, compiled."""

    def __init__(self, step: Step, sizes: dict[str, int], on: Devices, **options: Any):
        self.mesh, self.over = sizes_text(sizes), sharding.mesh(sizes)
        with self.over:
            self.step = sharding.jit(step.run, donate_argnums=0, **options)
            completion = self.step.complete(*step.args)
            self.estimated_seconds = completion.estimate(on).seconds
            placed = jax.tree.map(sharding.put, values(step.args), tuple(completion.in_shardings))
            self.state, self.rest = placed[0], placed[1:]
        self.times: list[float] = []

    def run(self) -> None:
        """One more step, and its time."""
        with self.over:
            begun = time.perf_counter()
            found = jax.block_until_ready(self.step(self.state, *self.rest))
            self.times.append(time.perf_counter() - begun)
        self.state = found[0] if jax.tree.structure(found) != jax.tree.structure(self.state) else found

    @property
    def seconds(self) -> float:
        """The median time of a step."""
        return statistics.median(self.times)


def values(shapes: Any) -> Any:
    """Small random arguments."""
    rng = np.random.default_rng(0)

    def one(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.asarray(0.01 + 0.05 * np.abs(rng.normal(size=leaf.shape)), leaf.dtype)
        return np.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype)

    return jax.tree.map(one, shapes)


def sampled(step: Step, sizes: dict[str, int], on: Devices, rng: random.Random) -> tuple[Any, ...]:
    """Random specs of the arguments, those that are always sharded alike by one draw."""
    of = planner.problem_of(step.run, *step.args, devices=on, mesh=sizes)
    state = len(jax.tree.leaves(step.args[0]))
    drawn: dict[int, P] = {}
    specs = []
    for k, v in enumerate(of.graph.inputs):
        node = of.node_of_value(v)
        if node >= 0 and node not in drawn:
            count = len(of.shardings[node])
            stays = k < state and rng.random() < 0.5
            drawn[node] = P() if stays else to_partition_spec(of.spec(node, rng.randrange(count)))
        specs.append(drawn.get(node, P()))
    return jax.tree.unflatten(jax.tree.structure(step.args), specs)


def row(name: str, options: Options, on: Devices) -> Row:
    """The figures of one model."""
    step = MODELS[name]("batch", MESHES[0])
    rng = random.Random(options.seed)
    plan = sharding.plan(sharding.jit(step.run, donate_argnums=0), *step.args, devices=on, seconds=60)
    own = Case(step, dict(plan.axes), on, plan=plan)
    cases = []
    for _ in range(options.samples):
        sizes = rng.choice(MESHES)
        cases.append(Case(step, sizes, on, in_shardings=sampled(step, sizes, on, rng)))
    alternate([own, *cases], 1)
    for case in (own, *cases):
        case.times.clear()  # compiling
    alternate([own, *cases], math.ceil(options.repeats / 3))
    median = statistics.median(case.seconds for case in cases)
    finalists = sorted(cases, key=lambda case: case.seconds)[:FINALISTS]
    for case in (own, *finalists):
        case.times.clear()
    alternate([own, *finalists], options.repeats)
    best = min(finalists, key=lambda case: case.seconds)
    return Row(
        name=name,
        mesh=own.mesh,
        annotations=len(plan.annotations),
        estimated_seconds=own.estimated_seconds,
        measured_seconds=own.seconds,
        best_mesh=best.mesh,
        best_estimated_seconds=best.estimated_seconds,
        best_seconds=best.seconds,
        median_seconds=median,
    )


def alternate(cases: Sequence[Case], times: int) -> None:
    """Runs all, one after the other, so that a slowdown of the machine affects all."""
    for _ in range(times):
        for case in cases:
            case.run()


def main(options: Options) -> None:
    """Measures, prints the table and writes the output file."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    with sharding.mesh(MESHES[0]) as mesh:
        chip = cost.calibrate(mesh, effort=cost.QUICK if options.quick else None).chip
    on = sharding.hardware.arranged(chip, NUM_DEVICES)
    rows = []
    for name in options.only:
        rows.append(row(name, options, on))
        print(f"{name}: {rows[-1].ratio:.2f} of the fastest of {options.samples} sampled", flush=True)
    result = measured("sampled_plans", options, rows, num_devices=NUM_DEVICES)
    print(*table(result), summary(result), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


def rows_of(result: Result) -> list[Row]:
    """The rows of a result file."""
    return [Row(**one) for one in result.rows]


def summary(result: Result) -> str:
    """In how many models the plan is as good, and the ratios."""
    ratios = [one.ratio for one in rows_of(result)]
    return (
        f"within {CLOSE - 1:.0%} of the fastest sampled plan in {sum(r <= CLOSE for r in ratios)} of {len(ratios)} "
        f"models, {statistics.median(ratios):.2f} of its time ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def table(result: Result) -> list[str]:
    """All figures as a Markdown table."""
    lines = [
        "| model | mesh | annotations | measured, ms | estimated, ms | fastest sampled, ms | estimated, ms | "
        "its mesh | median sampled, ms | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows_of(result):
        times = [one.measured_seconds, one.estimated_seconds, one.best_seconds, one.best_estimated_seconds]
        own, estimated, best, best_estimated = (f"{1e3 * t:.1f}" for t in times)
        lines.append(
            f"| {one.name} | {one.mesh} | {one.annotations} | {own} | {estimated} | {best} | {best_estimated} | "
            f"{one.best_mesh} | {1e3 * one.median_seconds:.1f} | {one.ratio:.2f} |"
        )
    return lines


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
