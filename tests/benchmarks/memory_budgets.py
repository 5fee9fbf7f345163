"""Peak memory, FLOPs and estimated time of GPT-3's step on 512 described v5p chips, by the memory that it may take.

    python -m tests.benchmarks.memory_budgets                          # two minutes
    python -m tests.benchmarks.memory_budgets --json memory_budgets.json
    python -m tests.benchmarks.memory_budgets --aot                    # also compiles them: needs libtpu, half an hour

What the layers keep, recompute and offload is chosen by `remat.fit` for each budget, and compared with full
recomputation, where a layer keeps its input alone. Batch 1,536, sharded over fsdp=64, tensor=8, activations along their
length, too. `--aot` compiles each program ahead of time with the TPU compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import sharding
from sharding import remat
from sharding.launch import memory_budget, workloads
from sharding.launch.config.model_config import ModelOptions
from sharding.launch.config.optimizer_config import Optimization
from sharding.models import layouts

from . import command_line
from .result_file import Result, measured

DEVICES, NUM_DEVICES = "v5p:8x8x8", 512
SIZES = {"fsdp": 64, "tensor": 8}
MODEL, BATCH = "gpt3-175b", 1536
SUMMED_UP = (16.0, 32.0, 80.0)
"""The budgets of the summary, in GB."""
FULL = "full recomputation"


@dataclass(frozen=True)
class Options:
    """The budgets and the output file."""

    budgets: tuple[float, ...] = (16, 24, 32, 35, 40, 48, 64, 80, 95)
    """In GB per device."""
    aot: bool = False
    """Compile the programs ahead of time for the chips, for the compiler's own peak memory."""
    json: Path | None = None
    """Output file of the figures."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The program for one budget; bytes, FLOPs and seconds are per device and step."""

    name: str
    policy: str
    peak_bytes: int
    host_bytes: int
    flops: float
    """Of matrix products."""
    estimated_seconds: float
    compiled_peak_bytes: int | None = None


def step_of(model: Any) -> memory_budget.Step:
    """The train step of a configuration."""
    family, _ = workloads.find(ModelOptions(name=MODEL))
    workload = family.build(MODEL, model, Optimization(sequence_parallel=True), steps=1000, seed=0)
    step = sharding.jit(workload.train_step, in_shardings=(None, layouts.batch(SIZES)), donate_argnums=(0,))
    return step, (workload.state_shapes, workload.batch_shapes(BATCH))


def rows(budgets: Sequence[float]) -> dict[Row, Any]:
    """Row -> the configuration: full recomputation, then each budget."""
    _, preset = workloads.find(ModelOptions(name=MODEL))
    found: dict[Row, Any] = {}
    with sharding.mesh(SIZES, devices=DEVICES):
        _, fitted = memory_budget.fit(preset, step_of, int(max(budgets) * 1e9))
        found[row(FULL, remat.Policy(), fitted.least)] = dataclasses.replace(preset, remat=(remat.Policy(),))
        for budget in budgets:
            one = fitted.within(budget * 1e9)
            found[row(f"{budget:g} GB", one.policy, one.cost)] = dataclasses.replace(preset, remat=(one.policy,))
    return found


def row(name: str, policy: Any, cost: remat.Cost) -> Row:
    """The figures of a program."""
    return Row(
        name=name,
        policy=str(policy),
        peak_bytes=cost.peak_bytes,
        host_bytes=cost.host_bytes,
        flops=cost.flops,
        estimated_seconds=cost.seconds,
    )


def compiled_peak(model: Any) -> int:
    """The peak memory of a program as the TPU compiler allocates it."""
    over = sharding.mesh(SIZES, devices=sharding.cost.compile_only(DEVICES))
    step, args = step_of(model)  # before entering the mesh, whose devices can't run anything
    with over:
        return sharding.cost.read_compiled(step.lower(*args).compile()).peak_bytes


def main(options: Options) -> None:
    """Prints a table and writes the figures."""
    jax.config.update("jax_platforms", "cpu")
    models = rows(options.budgets)
    by_policy = {one.policy: model for one, model in models.items()}  # budgets with the same choice have one program
    compiled = {policy: compiled_peak(model) for policy, model in by_policy.items()} if options.aot else {}
    found = [dataclasses.replace(one, compiled_peak_bytes=compiled.get(one.policy)) for one in models]
    result = measured("memory_budgets", options, found, num_devices=NUM_DEVICES, platform_name="v5p")
    print(*table(result), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


def summary(result: Result) -> str:
    """The programs of some budgets against full recomputation."""
    full, *others = [Row(**one) for one in result.rows]
    chosen = [one for one in others if one.name in (f"{budget:g} GB" for budget in SUMMED_UP)]
    return "; ".join([f"{FULL} takes {peak_of(full)}", *(f"{one.name}: {against(one, full)}" for one in chosen)])


def against(one: Row, full: Row) -> str:
    """A program against full recomputation, as text."""
    return (
        f"{peak_of(one)}, {one.flops / full.flops - 1:+.1%} FLOPs, estimated time "
        f"{one.estimated_seconds / full.estimated_seconds - 1:+.1%}"
    )


def peak_of(one: Row) -> str:
    """Its peak memory as compiled, or else as predicted, as text."""
    if one.compiled_peak_bytes is None:
        return f"{one.peak_bytes / 1e9:.1f} GB predicted"
    return f"{one.compiled_peak_bytes / 1e9:.1f} GB compiled"


def table(result: Result) -> list[str]:
    """All figures as a Markdown table."""
    found = [Row(**one) for one in result.rows]
    lines = [
        "| budget | kept and offloaded | peak, GB | compiled, GB | on the host, GB | FLOPs | estimated, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        compiled = "" if one.compiled_peak_bytes is None else f"{one.compiled_peak_bytes / 1e9:.1f}"
        lines.append(
            f"| {one.name} | {one.policy} | {one.peak_bytes / 1e9:.1f} | {compiled} | {one.host_bytes / 1e9:.1f} | "
            f"{one.flops:.4g} ({one.flops / found[0].flops - 1:+.1%}) | {one.estimated_seconds:.2f} |"
        )
    return lines


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
