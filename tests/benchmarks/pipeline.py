"""Pipelines of a GPT on four CPU devices: ours, PyTorch's, and one device, on the same weights and tokens in one run.

    python -m tests.benchmarks.pipeline                              # some 15 minutes; installs PyTorch separately
    python -m tests.benchmarks.pipeline --peer "" --json result.json # ours alone

A GPT of 6.8 million parameters, 8 layers and 256 tokens of context, with a batch of 16 in 8 microbatches. `contenders`
describes how they are measured. PyTorch runs eagerly and with compiled blocks, and its best counts. Each pipeline
device has one thread in both libraries; one device alone has as many threads as cores and runs the full batch at once.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import sharding
from sharding import P, pipeline
from sharding.models import gpt
from sharding.pipeline import schedules

from . import command_line, gpt_workload, result_file
from .contenders import DEVICES, Contender, Rounds, Times, alternate, ratio_row, seconds, start, updated
from .ratios import Ratio, unknown
from .result_file import Result, Row, measured

MICROBATCHES = 8

SCHEDULES: dict[str, Callable[..., pipeline.Schedule]] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": lambda **sizes: schedules.interleaved(chunks=2, **sizes),
    "zb_h1": schedules.zb_h1,
    "zb_v": schedules.zb_v,
}


@dataclass(frozen=True, kw_only=True)
class Options(Rounds):
    """What to measure."""

    schedules: tuple[str, ...] = tuple(SCHEDULES)
    executors: tuple[pipeline.Executor, ...] = ("mpmd", "spmd")
    json: Path | None = None
    """Where to write the figures."""


MICROBATCH = jax.ShapeDtypeStruct((gpt_workload.BATCH // MICROBATCHES, gpt_workload.CONFIG.context), jnp.int32)


def gradient(schedule: pipeline.Schedule, executor: pipeline.Executor) -> tuple[pipeline.ValueAndGrad, Any]:
    """The `value_and_grad` of a schedule, and the placed parameters."""
    split = pipeline.split(gpt_workload.model(), schedule.stages, inputs=MICROBATCH)
    both = pipeline.value_and_grad(
        split.stage_fn,
        gpt.loss,
        schedule,
        first_fn=split.first_fn,
        last_fn=split.last_fn,
        placed=True,
        executor=executor,
    )
    return both, split.params | {"stages": pipeline.place(split.params["stages"], schedule)}


def piped(name: str, executor: pipeline.Executor, devices: int = DEVICES) -> Contender:
    """A schedule over all devices."""
    both, params = gradient(SCHEDULES[name](stages=devices, microbatches=MICROBATCHES), executor)
    mesh = jax.sharding.get_mesh()
    specs = {part: P("pipe") if part == "stages" else P() for part in params}
    params = {part: jax.device_put(tree, jax.NamedSharding(mesh, specs[part])) for part, tree in params.items()}
    opt_state = jax.jit(gpt_workload.OPTIMIZER.init)(params)
    update = jax.jit(updated, donate_argnums=(0, 1))

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        cut = tokens.reshape(MICROBATCHES, MICROBATCH.shape[0], -1)
        loss, gradients = both(state[0], cut[:, :, :-1], cut[:, :, 1:])
        if executor == "spmd":
            return updated(*state, gradients), loss
        return update(*state, gradients), loss

    run = jax.jit(step, donate_argnums=0) if executor == "spmd" else step
    return Contender(name=f"{name}, {executor}", step=run, state=(params, opt_state))


def ours(options: Options) -> list[Contender]:
    """Our pipelines, run over all tokens in alternation."""
    with sharding.mesh(pipe=DEVICES):
        found = [piped(name, executor) for executor in options.executors for name in options.schedules]
        alternate(found, options.tokens(), options.rounds)
    return found


def program_sizes(name: str = "1f1b") -> list[Row]:
    """Compile time in CPU seconds and instruction count of a schedule's single program, by number of microbatches."""
    rows = []
    for microbatches in (8, 64):
        both, params = gradient(SCHEDULES[name](stages=DEVICES, microbatches=microbatches), "spmd")
        words = jax.ShapeDtypeStruct((microbatches, *MICROBATCH.shape), MICROBATCH.dtype)
        with sharding.mesh(pipe=DEVICES):
            lowered = jax.jit(both).lower(params, words, words)
            begin = time.process_time()
            text = lowered.compile().as_text()
        figures = {"compile_seconds": round(time.process_time() - begin, 2), "instructions": text.count(" = ")}
        rows.append({"kind": "one program", "name": name, "microbatches": microbatches, **figures})
    return rows


def bubbles() -> list[Row]:
    """The idle share of device time of each schedule, executed and simulated, with as many devices as cores."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bubbles.json"
        command = [sys.executable, "-m", "tests.benchmarks.bubbles", "--json", str(file)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return list(result_file.load(file).rows)


def ratio_rows(found: dict[str, Times]) -> list[Row]:
    """Our best over PyTorch's best, and each over one device."""

    def best(whose: str) -> Times | None:
        return next((times for name, times in found.items() if name.startswith(whose) and "single" not in name), None)

    mine, peer = best("ours"), best("PyTorch")
    assert mine is not None
    rows = [ratio_row("ours over one device", mine, found["ours, single"])]
    if peer is not None:
        alone = next(times for name, times in found.items() if name.startswith("PyTorch, single"))
        rows += [ratio_row("PyTorch over one device", peer, alone), ratio_row("ours over PyTorch", mine, peer)]
    return rows


def summary(result: Result) -> str:
    """The best step of each library, and how well idle time is simulated."""
    rows = result.of_kind("ratio")
    ratios = [Ratio.of_row(row) for row in rows]
    best = [f"{_quoted(row['ours'])} over {_quoted(row['other'])} {r}" for row, r in zip(rows, ratios, strict=True)]
    idle = result.of_kind("idle share")
    off = max(abs(row["difference_percent"]) for row in idle)
    schedules = f"{len(idle)} schedules on {idle[0]['num_devices']} devices"
    text = f"best steps: {', '.join(best)}; idle share as simulated within {off:.1f} points for {schedules}"
    return text + unknown(ratios)


def _quoted(name: str) -> str:
    library, _, variant = name.partition(", ")
    return f"{library} ({variant})"


def main(options: Options) -> None:
    """Measures, prints and writes the figures."""
    start()
    found = seconds(options, lambda: ours(options), "torch_pipeline.py")
    rows = [*(times.as_row() for times in found.values()), *ratio_rows(found), *program_sizes(), *bubbles()]
    result = measured("pipeline", options, rows, num_devices=DEVICES)
    print("\n".join(map(str, rows)), summary(result), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
