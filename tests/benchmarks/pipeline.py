"""Pipelines of a GPT on four CPU devices: ours, PyTorch's, and one device, on the same weights and tokens in one run.

    python -m tests.benchmarks.pipeline                              # some 15 minutes; installs PyTorch apart
    python -m tests.benchmarks.pipeline --peer "" --json result.json # ours alone

A step is the gradient of a batch of 16 in 8 microbatches and Adam's update: 6.8 million parameters, 8 layers, 256
tokens. Contenders take turns, so that a slow while of the machine is one of all. What is compared is the median of each
one's steps. All must give the losses of one device, or the run fails. One device is a process of its own, as it is for
PyTorch, and takes the batch as a whole. PyTorch runs as it is and with its blocks compiled, and its best counts. Each
of a pipeline's devices has one thread on either side, one device alone as many as there are cores.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import sharding
from sharding import P, pipeline
from sharding.models import gpt
from sharding.pipeline import schedules

from . import pipeline_data
from .peers.environment import torch_python

DEVICES = 4
MICROBATCHES = 8
THREADS = "NPROC"
"""The variable by which XLA:CPU is told how many threads share a device's work."""
WARM = 2
"""Steps before those that are timed."""
TOLERANCE = 1e-5
"""How far losses may be apart, relative."""

SCHEDULES: dict[str, Callable[..., pipeline.Schedule]] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": lambda **sizes: schedules.interleaved(chunks=2, **sizes),
    "zb_h1": schedules.zb_h1,
    "zb_v": schedules.zb_v,
}

Step = Callable[[Any, jax.Array], tuple[Any, jax.Array]]
"""(state, tokens [B, S + 1]) -> (state, loss)."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, and how often."""

    schedules: tuple[str, ...] = tuple(SCHEDULES)
    executors: tuple[pipeline.Executor, ...] = ("mpmd", "spmd")
    rounds: int = 2
    steps: int = 5
    """Steps of each contender in a round; two before them warm up."""
    peer: str = "~/.cache/sharding-peers"
    """Folder for PyTorch's environment; empty leaves PyTorch out."""
    alone: bool = False
    """Run one device alone, and print its steps: how it is measured in a process of its own."""
    json: Path | None = None
    """Where to write the figures."""


@dataclass(kw_only=True)
class Contender:
    """Something that trains, and how long its steps took."""

    name: str
    step: Step
    state: Any
    seconds: list[float]
    losses: list[float]

    def run(self, tokens: Iterable[np.ndarray], *, timed: bool) -> None:
        """A step for each batch."""
        for batch in tokens:
            begin = time.perf_counter()
            self.state, loss = jax.block_until_ready(self.step(self.state, batch))
            if timed:
                self.seconds.append(time.perf_counter() - begin)
            self.losses.append(float(loss))


def single() -> Contender:
    """One device, the whole batch at once."""
    graph, params = nnx.split(pipeline_data.model(), nnx.Param)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(lambda p: gpt.next_token_loss(nnx.merge(graph, p), tokens))(params)
        return _updated(params, opt_state, gradients), loss

    state = params, pipeline_data.OPTIMIZER.init(params)
    return Contender(name="single", step=jax.jit(step, donate_argnums=0), state=state, seconds=[], losses=[])


MICROBATCH = jax.ShapeDtypeStruct((pipeline_data.BATCH // MICROBATCHES, pipeline_data.CONFIG.context), jnp.int32)


def gradient(schedule: pipeline.Schedule, executor: pipeline.Executor) -> tuple[pipeline.ValueAndGrad, Any]:
    """That of a schedule, and the parameters, placed."""
    split = pipeline.split(pipeline_data.model(), schedule.stages, inputs=MICROBATCH)
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
    opt_state = jax.jit(pipeline_data.OPTIMIZER.init)(params)
    update = jax.jit(_updated, donate_argnums=(0, 1))

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        cut = tokens.reshape(MICROBATCHES, MICROBATCH.shape[0], -1)
        loss, gradients = both(state[0], cut[:, :, :-1], cut[:, :, 1:])
        if executor == "spmd":
            return _updated(*state, gradients), loss
        return update(*state, gradients), loss

    run = jax.jit(step, donate_argnums=0) if executor == "spmd" else step
    return Contender(name=f"{name}, {executor}", step=run, state=(params, opt_state), seconds=[], losses=[])


def _updated(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
    updates, opt_state = pipeline_data.OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def ours(options: Options, tokens: np.ndarray) -> list[Contender]:
    """Our pipelines, each through all tokens, in turns."""
    with sharding.mesh(pipe=DEVICES):
        found = [piped(name, executor) for executor in options.executors for name in options.schedules]
        for contender in found:
            contender.run(tokens[:WARM], timed=False)
        for part in np.array_split(tokens[WARM:], options.rounds):
            for contender in found:
                contender.run(part, timed=True)
    return found


def apart(options: Options) -> dict[str, Any]:
    """One device in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.pipeline", "--alone", "--rounds", "1", "--steps"]
    env = {name: value for name, value in os.environ.items() if name != THREADS}
    ran = subprocess.run([*command, str(options.steps)], check=True, capture_output=True, text=True, env=env)
    return json.loads(ran.stdout.splitlines()[-1])


def alone(options: Options) -> None:
    """Prints the steps of one device."""
    contender, tokens = single(), pipeline_data.tokens(steps=WARM + options.steps)
    contender.run(tokens[:WARM], timed=False)
    contender.run(tokens[WARM:], timed=True)
    print(json.dumps({"seconds": contender.seconds, "losses": contender.losses}))


def program_sizes(name: str = "1f1b") -> dict[str, dict[str, float]]:
    """Microbatches -> CPU seconds in which one program of a schedule compiles, and its instructions."""
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
    """Schedule -> percent of devices' time that is idle, executed and simulated, with as many devices as cores."""
    command = [sys.executable, "-m", "tests.benchmarks.bubbles"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(ran.stdout.splitlines()[-1])


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def theirs(python: Path, steps: int) -> list[dict[str, Any]]:
    """PyTorch's, as it is and compiled."""
    script = Path(__file__).parent / "peers" / "torch_pipeline.py"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gpt.npz"
        pipeline_data.export(file, steps=WARM + steps)
        found = []
        for more in ([], ["--compile"]):
            ran = subprocess.run([python, script, file, "--warmup", str(WARM), *more], capture_output=True, text=True)
            lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
            found += map(json.loads, lines)
            if ran.returncode:
                print(f"PyTorch {' '.join(more)}: {ran.stderr.strip().splitlines()[-1]}")
    return found


def main(options: Options) -> None:
    """Measures, prints a line for each contender, and writes the figures."""
    python = torch_python(Path(options.peer).expanduser()) if options.peer else None
    rounds = range(options.rounds)
    steps: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    devices: list[dict[str, Any]] = [apart(options)]
    peers = [theirs(python, options.steps)] if python else []
    for each in ours(options, pipeline_data.tokens(steps=WARM + options.rounds * options.steps)):
        steps[f"ours, {each.name}"], losses[f"ours, {each.name}"] = each.seconds, each.losses
    devices += [apart(options) for _ in rounds[1:]]
    peers += [theirs(python, options.steps) for _ in rounds[1:]] if python else []
    steps["ours, single"] = [seconds for each in devices for seconds in each["seconds"]]
    for line in (line for each in peers for line in each):
        name = f"PyTorch, {line['name']}" + (", compiled" if line["compiled"] else "")
        steps.setdefault(name, []).extend(line["step_seconds"][WARM:])
        losses[name] = line["losses"]
    _check(losses, devices[0]["losses"])
    figures = _figures(steps) | {"1f1b in one program, by microbatches": program_sizes()}
    figures |= {f"idle percent, {min(DEVICES, num_cores())} devices": bubbles()}
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _check(losses: dict[str, list[float]], wanted: list[float]) -> None:
    for name, found in losses.items():
        np.testing.assert_allclose(found[: len(wanted)], wanted[: len(found)], rtol=TOLERANCE, err_msg=name)


def _figures(steps: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and our best over PyTorch's best and over each one's single device."""
    middle = {name: statistics.median(seconds) for name, seconds in steps.items()}

    def best(whose: str) -> str | None:
        names = [name for name in middle if name.startswith(whose) and "single" not in name]
        return min(names, key=lambda name: middle[name], default=None)

    mine, peer = best("ours"), best("PyTorch")
    assert mine is not None
    ratios = {"ours over one device": middle[mine] / middle["ours, single"]}
    if peer is not None:
        ratios["ours over PyTorch"] = middle[mine] / middle[peer]
        alone = [middle[name] for name in middle if name.startswith("PyTorch, single")]
        ratios["PyTorch over one device"] = middle[peer] / min(alone)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, JAX {jax.__version__}",
        "seconds": {name: float(f"{value:.4g}") for name, value in sorted(middle.items(), key=lambda item: item[1])},
        "best": [mine, *([peer] if peer else [])],
        "ratios": {name: float(f"{value:.3g}") for name, value in ratios.items()},
    }


if __name__ == "__main__":
    chosen = tyro.cli(Options)
    jax.config.update("jax_platforms", "cpu")
    if chosen.alone:
        alone(chosen)
    else:
        os.environ[THREADS] = "1"
        jax.config.update("jax_num_cpu_devices", DEVICES)
        main(chosen)
