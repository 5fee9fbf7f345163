"""Short training runs, through the command line or step by step."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import sharding
from sharding import launch
from sharding.launch import jitted_workload, metrics
from sharding.launch.workload import TrainState, Workload

STEPS = 6
SMALL = [
    "--steps",
    str(STEPS),
    "--batch",
    "8",
    "--eval-every",
    "3",
    "--checkpoint-every",
    "3",
    "--lr",
    "1e-3",
    "--scan",
]
MESH = "data=2,fsdp=2,tensor=2"


class StepResults(NamedTuple):
    """Metrics of each step, and the state after the last."""

    metrics_per_step: list[Any]
    state: TrainState
    completion: sharding.Completion


def run_two_steps(workload: Workload, sizes: dict[str, int]) -> StepResults:
    """Two steps, as `run_steps`."""
    return run_steps(workload, sizes, 2)


def run_steps(workload: Workload, sizes: dict[str, int], number: int) -> StepResults:
    """Steps from a fixed initial state on fixed batches of 16 sequences, on a mesh of these sizes."""
    config = workload.config
    tokens = np.random.default_rng(0).integers(0, config.vocab, (number, 16, config.context + 1), np.int32)
    with sharding.mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())]) as mesh:
        over = jitted_workload.jit_workload(workload, mesh, batch_size=16)
        state, metrics_per_step = over.initial_state(0), []
        for batch in tokens:
            state, measured = over.train_step(state, over.put(batch))
            metrics_per_step.append(jax.device_get(measured))
    return StepResults(metrics_per_step, state, over.completion)


def check_same(found: StepResults, expected: StepResults) -> None:
    """Asserts that metrics and parameters agree up to rounding."""
    for ours, theirs in zip(found.metrics_per_step, expected.metrics_per_step, strict=True):
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    pairs = (jax.tree.leaves(jax.device_get(each.state.params)) for each in (found, expected))
    for a, b in zip(*pairs, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def train(out: Path, *args: str, mesh: str = MESH) -> list[metrics.MetricValues]:
    """Metrics of a run in this process."""
    launch.main(["train", *SMALL, "--mesh", mesh, "--sample", "0", "--out", str(out), *args])
    return metrics.read(out / metrics.FILE_NAME)


def losses(lines: list[metrics.MetricValues]) -> list[float]:
    """The loss of every step."""
    return [value for _, value in metrics.series(lines, "loss")]


def error_output(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The error message of a rejected run, without a traceback and with exit code 2."""
    with pytest.raises(SystemExit, match="2"):
        launch.main(["train", *SMALL, *args])
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and "Traceback" not in shown
    return shown
