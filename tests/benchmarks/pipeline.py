"""Pipelines of a GPT on four CPU devices: ours, PyTorch's, and one device, on the same weights and tokens in one run.

    python -m tests.benchmarks.pipeline                              # some 15 minutes; installs PyTorch separately
    python -m tests.benchmarks.pipeline --peer "" --json result.json # ours alone

A GPT of 6.8 million parameters, 8 layers and 256 tokens of context, with a batch of 16 in 8 microbatches. `contenders`
describes how they are measured. PyTorch runs eagerly and with compiled blocks, and its best counts. Each pipeline
device has one thread in both libraries; one device alone has as many threads as cores and runs the full batch at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import sharding
from sharding import P, pipeline
from sharding.models import gpt
from sharding.pipeline import schedules

from . import gpt_workload
from .contenders import (
    DEVICES,
    Contender,
    Rounds,
    alternate,
    machine,
    medians,
    num_cores,
    rounded,
    seconds,
    start,
    updated,
    write,
)

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


def program_sizes(name: str = "1f1b") -> dict[str, dict[str, float]]:
    """Microbatches -> compile time in CPU seconds and instruction count of a schedule's single program."""
    found = {}
    for microbatches in (8, 64):
        both, params = gradient(SCHEDULES[name](stages=DEVICES, microbatches=microbatches), "spmd")
        words = jax.ShapeDtypeStruct((microbatches, *MICROBATCH.shape), MICROBATCH.dtype)
        with sharding.mesh(pipe=DEVICES):
            lowered = jax.jit(both).lower(params, words, words)
            begin = time.process_time()
            text = lowered.compile().as_text()
        seconds = time.process_time() - begin
        found[str(microbatches)] = {"seconds": round(seconds, 2), "instructions": text.count(" = ")}
    return found


def bubbles() -> dict[str, dict[str, float]]:
    """Schedule -> percent of device time that is idle, executed and simulated, with as many devices as cores."""
    command = [sys.executable, "-m", "tests.benchmarks.bubbles"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(ran.stdout.splitlines()[-1])


def main(options: Options) -> None:
    """Measures, prints and writes the figures."""
    figures = _figures(medians(seconds(options, lambda: ours(options), "torch_pipeline.py")))
    figures |= {"1f1b in one program, by microbatches": program_sizes()}
    figures |= {f"idle percent, {min(DEVICES, num_cores())} devices": bubbles()}
    write(figures, options.json)


def _figures(middle: dict[str, float]) -> dict[str, Any]:
    """Medians, and the ratios of our best to PyTorch's best and of each best to its single device."""

    def best(whose: str) -> str | None:
        return next((name for name in middle if name.startswith(whose) and "single" not in name), None)

    mine, peer = best("ours"), best("PyTorch")
    assert mine is not None
    ratios = {"ours over one device": middle[mine] / middle["ours, single"]}
    if peer is not None:
        ratios["ours over PyTorch"] = middle[mine] / middle[peer]
        alone = [middle[name] for name in middle if name.startswith("PyTorch, single")]
        ratios["PyTorch over one device"] = middle[peer] / min(alone)
    return {
        "machine": machine(),
        "seconds": rounded(middle, 4),
        "best": [mine, *([peer] if peer else [])],
        "ratios": rounded(ratios, 3),
    }


if __name__ == "__main__":
    chosen = tyro.cli(Options)
    start()
    main(chosen)
