"""A plan of GPT-3 for 512 described chips beside the layout that is written by hand, both compiled ahead of time.

    python -m tests.benchmarks.planned_gpt3                             # v5p:8x8x8, two minutes
    python -m tests.benchmarks.planned_gpt3 --devices h100:64x8
    python -m tests.benchmarks.planned_gpt3 --aot --json planned.json   # also compiles both: libtpu, jax[cuda13]

The step of `models/` with 175 billion parameters and a batch of 1,536 sequences. By hand: fully sharded over fsdp=64,
Megatron's layout over tensor=8, activations along their length, too, and the preset's recomputation. The plan has a
mesh of the same sizes and finds annotations and recomputation by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

import sharding
from sharding import cost
from sharding.display.units import bytes_text
from sharding.launch import workloads
from sharding.launch.commands.plan import train_step
from sharding.launch.config.model_config import ModelOptions
from sharding.launch.config.plan_config import Plan

from . import command_line
from .memory_budgets import BATCH, MODEL, NUM_DEVICES, SIZES, step_of
from .result_file import Result, measured

PLANNED = {"x": 64, "y": 8}
Program = tuple[Callable[[Any], AbstractContextManager[Any]], Any, tuple[Any, Any]]
"""The mesh over some devices, the step, and its abstract arguments."""


@dataclass(frozen=True)
class Options:
    """The devices and the output file."""

    devices: str = "v5p:8x8x8"
    """512 chips to plan for."""
    aot: bool = False
    """Compile ahead of time for the chips: bytes sent and peak memory are then also those of the compiler."""
    json: Path | None = None
    """Output file of the figures."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One program; bytes and seconds are per device and step."""

    name: str
    annotations: dict[str, str]
    recomputation: str
    estimated_seconds: float
    sent_bytes: int
    peak_bytes: int
    planning_seconds: float = 0.0
    """Of this process's CPU time."""
    compiled_sent_bytes: int | None = None
    compiled_wire_bytes: int | None = None
    """What a device puts on its links: an all-reduce sends about twice its bytes."""
    compiled_peak_bytes: int | None = None


def by_hand() -> Program:
    """The layout of `models/`."""
    _, preset = workloads.find(ModelOptions(name=MODEL))
    return lambda devices: sharding.mesh(SIZES, devices=devices), *step_of(preset)


def planned(devices: str) -> tuple[Program, Row]:
    """A plan, and what it says of itself."""
    step, args = train_step(Plan(model=ModelOptions(name=MODEL), devices=devices, batch=BATCH))
    start = time.process_time()
    plan = sharding.plan(step, *args, devices=devices, mesh=PLANNED, seconds=1800, on_progress=print)
    row = Row(
        name="plan",
        annotations={name: str(spec) for name, spec in plan.annotations.items()},
        recomputation=", ".join(map(str, plan.remat.values())),
        estimated_seconds=plan.costs.seconds,
        sent_bytes=plan.costs.sent_bytes,
        peak_bytes=plan.costs.peak_bytes,
        planning_seconds=time.process_time() - start,
    )
    return (plan.mesh, step.with_plan(plan), args), row


def predicted(program: Program, devices: str) -> Row:
    """The program by hand, before it compiles."""
    mesh, step, args = program
    with mesh(devices):
        completion = step.complete(*args)
        return Row(
            name="by hand",
            annotations={},
            recomputation="the preset's",
            estimated_seconds=completion.estimate().seconds,
            sent_bytes=completion.communication().total_bytes,
            peak_bytes=completion.memory().peak_bytes,
        )


def compiled(row: Row, program: Program, devices: str) -> Row:
    """The figures with those of the compiler."""
    mesh, step, args = program
    with mesh(cost.compile_only(devices)):
        facts = cost.read_compiled(step.lower(*args).compile())
    return replace(
        row,
        compiled_sent_bytes=sum(size for _, size in facts.by_kind().values()),
        compiled_wire_bytes=sum(c.wire_bytes for c in facts.collectives),
        compiled_peak_bytes=facts.peak_bytes,
    )


def main(options: Options) -> None:
    """Prints both programs and writes the figures."""
    jax.config.update("jax_platforms", "cpu")
    hand = by_hand()
    plan, plan_row = planned(options.devices)
    rows = [predicted(hand, options.devices), plan_row]
    if options.aot:
        rows = [compiled(row, program, options.devices) for row, program in zip(rows, (hand, plan), strict=True)]
    chip = options.devices.partition(":")[0]
    result = measured("planned_gpt3", options, rows, num_devices=NUM_DEVICES, platform_name=chip)
    print(*table(result), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


def summary(result: Result) -> str:
    """The plan against the layout by hand."""
    hand, plan = (Row(**one) for one in result.rows)
    text = f"estimated time {plan.estimated_seconds / hand.estimated_seconds:.2f} of the layout by hand"
    if plan.compiled_peak_bytes is None or hand.compiled_peak_bytes is None:
        return text
    assert plan.compiled_wire_bytes is not None
    assert hand.compiled_wire_bytes is not None
    wire = plan.compiled_wire_bytes / hand.compiled_wire_bytes
    return (
        f"{text}; compiled, {wire:.2f} of its bytes on the wire, and peak "
        f"memory {plan.compiled_peak_bytes / 1e9:.1f} GB against {hand.compiled_peak_bytes / 1e9:.1f}"
    )


def table(result: Result) -> list[str]:
    """All figures as a Markdown table."""
    lines = [
        "| | recomputation | estimated, s | sent | peak | sent, compiled | on the wire | peak, compiled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in (Row(**row) for row in result.rows):
        of_compiler = (one.compiled_sent_bytes, one.compiled_wire_bytes, one.compiled_peak_bytes)
        sizes = [bytes_text(one.sent_bytes), bytes_text(one.peak_bytes)]
        sizes += ["" if size is None else bytes_text(size) for size in of_compiler]
        lines.append(f"| {one.name} | {one.recomputation} | {one.estimated_seconds:.1f} | {' | '.join(sizes)} |")
    return lines


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
