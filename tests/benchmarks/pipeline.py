"""Pipelines of a GPT on four CPU devices: ours, PyTorch's, and one device, on the same weights and tokens in one run.

    python -m tests.benchmarks.pipeline                              # 10 to 20 minutes; installs PyTorch apart
    python -m tests.benchmarks.pipeline --peer "" --json result.json # ours alone

A step is the gradient of a batch of 16 in 8 microbatches and Adam's update: 6.8 million parameters, 8 layers, 256
tokens. Rounds in turns: in each every contender runs its steps once, so that a slow moment of the machine is one round
of all. What is compared is the median of each one's steps. All must give one device's losses, or the run fails. PyTorch
runs as it is and with its blocks compiled, and its best counts.

Bubbles: each task is timed alone, one after the other; the schedule with these times says what share of the devices'
time is idle. Where there are fewer cores than devices, they can't all work at once however good the schedule: the
executed share is then that of the cores.
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
    rounds: int = 5
    steps: int = 4
    """Steps of each contender in a round; one before them warms up."""
    peer: str = "~/.cache/sharding-peers"
    """Folder for PyTorch's environment; empty leaves PyTorch out."""
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


def piped(name: str, executor: pipeline.Executor) -> Contender:
    """A schedule over all devices."""
    schedule = SCHEDULES[name](stages=DEVICES, microbatches=MICROBATCHES)
    rows = pipeline_data.BATCH // MICROBATCHES
    split = pipeline.split(
        pipeline_data.model(),
        schedule.stages,
        inputs=jax.ShapeDtypeStruct((rows, pipeline_data.CONFIG.context), jnp.int32),
    )
    both = pipeline.value_and_grad(
        split.stage_fn,
        gpt.loss,
        schedule,
        first_fn=split.first_fn,
        last_fn=split.last_fn,
        placed=True,
        executor=executor,
    )
    params = split.params | {"stages": pipeline.place(split.params["stages"], schedule)}
    mesh = jax.sharding.get_mesh()
    specs = {part: P("pipe") if part == "stages" else P() for part in params}
    params = {
        part: jax.device_put(tree, jax.NamedSharding(mesh, specs[part])) for part, tree in params.items()
    }
    opt_state = jax.jit(pipeline_data.OPTIMIZER.init)(params)
    update = jax.jit(_updated, donate_argnums=(0, 1))

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        cut = tokens.reshape(MICROBATCHES, rows, -1)
        loss, gradients = both(state[0], cut[:, :, :-1], cut[:, :, 1:])
        if executor == "spmd":
            return _updated(*state, gradients), loss
        return update(*state, gradients), loss

    run = jax.jit(step, donate_argnums=0) if executor == "spmd" else step
    return Contender(name=f"{name}, {executor}", step=run, state=(params, opt_state), seconds=[], losses=[])


def _updated(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
    updates, opt_state = pipeline_data.OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
