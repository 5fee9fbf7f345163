"""The time to plan large train steps, and our plans compared with those of XLA's own auto-sharding

    python -m tests.benchmarks.planning                              # some minutes; needs libtpu (extra tpu)
    python -m tests.benchmarks.planning --layers                     # the times alone
    python -m tests.benchmarks.planning --json planning.json

The times are those of a step that nothing has traced: tracing and completing it, building the problem, solving it to a
proven optimum without a memory limit; then `sharding.plan` with all of that, the annotations and next best specs, for
which it takes up to `--seconds` more. A what-if adds an annotation to that plan. CPU seconds are of one process, which
uses about one core: they are what the same takes on a machine that does nothing else.

XLA's auto-sharding (an integer program, solved by CP-SAT) plans in an environment with the last libtpu that has it,
which is made under `--peer` by Python 3.11 and pip; its plans are kept there. What it takes is the compile that plans,
less one that is told the plan. Both plans are then compiled by the installed TPU compiler.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

import sharding
from sharding import P, planner
from sharding.launch import workloads
from sharding.launch.config.model_config import ModelOptions
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.jitted_workload import planned_step

from . import command_line, compared_plans
from .peers import plain_gpt
from .result_file import Result, Row, measured

DEPTHS = (12, 24, 48, 96)
"""Layers of GPT-3 that are planned for; the last one is the published model."""
PEER_DEVICES, PEER_AXES = "v5e:4x4", {"data": 4, "model": 4}


@dataclass(frozen=True)
class Options:
    """The programs and the output file."""

    only: Literal["all", "gpt", "gpt3", "llama", "none"] = "all"
    """The steps that are planned for their time."""
    seconds: float = 60.0
    """The limit that `sharding.plan` gets, after which it tries no more specs."""
    layers: tuple[int, ...] = (1, 2, 3, 4)
    """Layers of the GPTs that are compared with XLA's auto-sharding; none to leave it out."""
    budgets: tuple[int, ...] = (0, 16)
    """Memory budgets of this comparison in GB; 0 is XLA's default, 1.1 times the bound that it finds."""
    peer: str = "~/.cache/sharding-peers"
    """Folder of XLA's environment and plans."""
    json: Path | None = None
    """Output file of the figures."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A step to plan."""

    name: str
    devices: str
    axes: Mapping[str, int]
    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    """Yields the step as a new function, and its abstract arguments."""
    what_if: Mapping[str, P]
    """The annotation that is added to the plan."""


def unrolled(layers: int = 24) -> Program:
    """A GPT with as many equations as layers, on 64 devices."""
    return Program(
        name=f"GPT, {layers} layers, unrolled",
        devices="v5e:8x8",
        axes={"data": 8, "model": 8},
        make=lambda: compared_plans.unplanned_step(plain_gpt.Sizes(layers=layers)),
        what_if={"state/params/head": P(None, "model")},
    )


def of_the_command_line(name: str, preset: str, devices: str, axes: Mapping[str, int], batch: int, **changes: Any):
    """A model of `sharding train`, without a layout; layers are scanned and recomputed."""
    family, model = workloads.find(ModelOptions(name=preset))
    model = dataclasses.replace(model, **changes)

    def make() -> tuple[Any, tuple[Any, ...]]:
        workload = family.build(preset, model, Optimization(), steps=1000, seed=0)
        return planned_step(workload), (workload.state_shapes, workload.batch_shapes(batch))

    return Program(name=name, devices=devices, axes=axes, make=make, what_if={"batch": P(next(iter(axes)))})


def gpt24() -> Program:
    """The width of the unrolled one."""
    sizes = {"features": 2048, "heads": 16, "kv_heads": 16, "mlp_features": 8192, "context": 1024}
    axes = {"fsdp": 8, "tensor": 8}
    return of_the_command_line("GPT, 24 layers, scanned", "gpt-xl", "v5e:8x8", axes, 64, layers=24, **sizes)


def gpt3(layers: int) -> Program:
    """GPT-3 at a depth, on the mesh of `scale.py`."""
    axes = {"fsdp": 64, "tensor": 8}
    return of_the_command_line(f"GPT-3, {layers} layers", "gpt3-175b", "v5p:8x8x8", axes, 1536, layers=layers)


def llama() -> Program:
    """8 billion parameters: Llama 3's width, depth, vocabulary and grouped queries, with an MLP of as many weights."""
    axes = {"fsdp": 8, "tensor": 8}
    sizes = {"vocab": 128_256, "mlp_features": 21_504}
    return of_the_command_line("8B, like Llama 3", "gpt-7b", "v5p:4x4x4", axes, 64, **sizes)


PROGRAMS: Mapping[str, Callable[[], list[Program]]] = {
    "gpt": lambda: [unrolled(), gpt24()],
    "gpt3": lambda: [gpt3(layers) for layers in DEPTHS],
    "llama": lambda: [llama()],
}


class Clock:
    """Times calls by the clock and in CPU seconds, both under one name."""

    def __init__(self) -> None:
        self.row: Row = {}

    def __call__(self, name: str, f: Callable[[], Any]) -> Any:
        begun, cpu = time.perf_counter(), time.process_time()
        found = f()
        self.row[f"{name}_cpu_seconds"] = time.process_time() - cpu
        self.row[f"{name}_seconds"] = time.perf_counter() - begun
        return found


def speed(program: Program, seconds: float) -> Row:
    """The times of planning one step."""
    clock = Clock()
    step, args = program.make()
    with sharding.mesh(dict(program.axes), devices=program.devices) as mesh:
        completion = clock("complete", lambda: step.complete(*args))
        graph, on = completion.assignment.graph, sharding.topology(mesh)
    of = clock("problem", lambda: planner.of_graph(graph, on, annotations=graph.annotations))
    solution = clock("solve", lambda: planner.solve(of.problem, memory_bytes=float("inf"), seconds=seconds))
    step, args = program.make()
    given = {"devices": program.devices, "mesh": program.axes, "seconds": seconds}
    plan = clock("plan", lambda: sharding.plan(step, *args, **given))
    other = clock("what_if", lambda: plan.what_if(program.what_if, seconds=seconds))
    return {
        "kind": "time",
        "name": program.name,
        "devices": program.devices,
        "num_devices": mesh.size,
        "mesh": dict(program.axes),
        "ops": len(graph.ops),
        "nodes": of.problem.num_nodes,
        "is_proven": solution.is_proven,
        "proven_seconds": sum(clock.row[f"{part}_seconds"] for part in ("complete", "problem", "solve")),
        "proven_cpu_seconds": sum(clock.row[f"{part}_cpu_seconds"] for part in ("complete", "problem", "solve")),
        **clock.row,
        "annotations": len(plan.annotations),
        "step_seconds": plan.costs.seconds,
        "peak_bytes": plan.costs.peak_bytes,
        "what_if_step_seconds": other.costs.seconds,
    }


def warm_up() -> None:
    """Loads what the first plan of a process loads."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = {"devices": "v5e:2x2", "mesh": {"x": 4}}
    sharding.plan(lambda x: x @ x, x, **plan)
    planner.solve(planner.problem_of(lambda x: x @ x, x, **plan).problem, algorithm="alpa")  # SciPy's HiGHS


def main(options: Options) -> None:
    """Prints a table and writes the figures."""
    jax.config.update("jax_platforms", "cpu")
    warm_up()
    found: list[Row] = []
    for key, programs in PROGRAMS.items():
        for program in programs() if options.only in ("all", key) else []:
            found.append(speed(program, options.seconds))
            print(time_line(found[-1]), flush=True)
    peer = Path(options.peer).expanduser()
    for layers in options.layers:
        for budget in options.budgets:
            sizes = plain_gpt.Sizes(layers=layers)
            for row in compared_plans.rows(sizes, budget, devices=PEER_DEVICES, axes=PEER_AXES, peer=peer):
                found.append(row)
                print(plan_line(row), flush=True)
    result = measured("planning", options, found, num_devices=512, platform_name="v5e and v5p")
    print(*table(result), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


def time_line(row: Row) -> str:
    """The times of one step, as text."""
    proof = "proven" if row["is_proven"] else "not proven"
    return (
        f"{row['name']} on {row['num_devices']} devices: {proof} in {row['proven_cpu_seconds']:.1f} CPU s, "
        f"planned in {row['plan_cpu_seconds']:.1f}, what-if in {row['what_if_cpu_seconds']:.1f}"
    )


def plan_line(row: Row) -> str:
    """One plan's figures, as text."""
    head = f"{row['layers']} layers, {row['budget_gb'] or 'default'} GB, {row['name']}"
    if "error" in row:
        return f"{head}: {row['error']}"
    return f"{head}: sends {row['sent_bytes'] / 1e9:.2f} GB, peak {row['peak_bytes'] / 1e9:.2f} GB"


def summary(result: Result) -> str:
    """The times of all steps, and our plans over XLA's in time, bytes and peak memory."""
    return "; ".join([*map(time_line, result.of_kind("time")), *against(result)])


def against(result: Result) -> list[str]:
    """Our plans over XLA's, as the program that sends least of those compiled from it, per program."""
    found = []
    rows = result.of_kind("plan")
    for key in dict.fromkeys((row["layers"], row["budget_gb"]) for row in rows):
        own = {row["name"]: row for row in rows if (row["layers"], row["budget_gb"]) == key}
        layers, budget = key
        head = f"GPT, {layers} layer{'s' * (layers > 1)}, {f'{budget} GB' if budget else 'no more memory'}"
        ours = own.get(compared_plans.OURS)
        all_theirs = [row for name, row in own.items() if name.startswith(compared_plans.THEIRS) and "error" not in row]
        theirs = min(all_theirs, key=lambda row: row["sent_bytes"])
        if ours is None or "error" in ours:
            found.append(f"{head}: none of ours fits")
            continue
        names = "planning_cpu_seconds", "sent_bytes", "peak_bytes"
        time_ratio, size, peak = (f"{ours[name] / theirs[name]:.2f}" for name in names)
        step = ours["estimated_seconds"] / min(row.get("estimated_seconds", math.inf) for row in all_theirs)
        found.append(
            f"{head}: planned in {time_ratio} of the time of {compared_plans.THEIRS}, sends {size}, peak {peak}, "
            f"estimated step {step:.2f}"
        )
    return found


PARTS = ("complete", "problem", "solve", "proven", "plan", "what_if")
TIME_HEAD = [
    "step",
    "devices",
    "ops",
    "nodes",
    *(part.replace("_", "-") for part in PARTS),
    "estimated step",
    "peak, GB",
]
PLAN_HEAD = [
    "layers",
    "budget, GB",
    "plan",
    "compiler",
    "planning",
    "collectives, GB",
    "sent, GB",
    "peak, GB",
    "estimated step, s",
]


def table(result: Result) -> list[str]:
    """All figures as Markdown tables."""
    times = list(map(time_cells, result.of_kind("time")))
    plans = [plan_cells(row) for row in result.of_kind("plan") if "error" not in row]
    lines = ["Seconds of the clock (of the CPU).", ""]
    lines += markdown(TIME_HEAD, times) if times else []
    return [*lines, *([""] if times and plans else []), *(markdown(PLAN_HEAD, plans) if plans else [])]


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table."""
    cells = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, row))} |" for row in cells]


def time_cells(row: Row) -> list[Any]:
    """The figures of a step."""
    times = [f"{row[f'{part}_seconds']:.2f} ({row[f'{part}_cpu_seconds']:.2f})" for part in PARTS]
    step = f"{row['step_seconds']:.4g} s"
    return [row["name"], row["num_devices"], row["ops"], row["nodes"], *times, step, f"{row['peak_bytes'] / 1e9:.1f}"]


def plan_cells(row: Row) -> list[Any]:
    """The figures of a plan."""
    planning = f"{row['planning_seconds']:.1f} ({row['planning_cpu_seconds']:.1f})"
    sizes = [f"{row[name] / 1e9:.2f}" for name in ("collective_bytes", "sent_bytes", "peak_bytes")]
    seconds = f"{row['estimated_seconds']:.4f}" if "estimated_seconds" in row else ""
    return [row["layers"], row["budget_gb"] or "default", row["name"], row["compiler"], planning, *sizes, seconds]


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
