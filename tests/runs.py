"""Runs of a few steps for the tests of the command line."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import sharding
from sharding import launch
from sharding.launch import metrics, program
from sharding.launch.task import Task, TrainState

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


class Steps(NamedTuple):
    """What steps of a GPT measured, and the state after them."""

    figures: list[Any]
    state: TrainState
    completion: sharding.Completion


def two_steps(task: Task, sizes: dict[str, int]) -> Steps:
    """From the same state on the same sequences, on a mesh of these sizes."""
    return steps(task, sizes, 2)


def steps(task: Task, sizes: dict[str, int], number: int) -> Steps:
    """So many from the same state, each of the same 16 sequences, on a mesh of these sizes."""
    config = task.config
    tokens = np.random.default_rng(0).integers(0, config.vocab, (number, 16, config.context + 1), np.int32)
    with sharding.mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())]) as mesh:
        over = program.over(task, mesh, batch_size=16)
        state, figures = over.initial_state(0), []
        for batch in tokens:
            state, measured = over.train_step(state, over.put(batch))
            figures.append(jax.device_get(measured))
    return Steps(figures, state, over.completion)


def check_same(found: Steps, wanted: Steps) -> None:
    """Fails where figures or parameters differ by more than rounding."""
    for ours, theirs in zip(found.figures, wanted.figures, strict=True):
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    pairs = (jax.tree.leaves(jax.device_get(each.state.params)) for each in (found, wanted))
    for a, b in zip(*pairs, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def train(out: Path, *args: str, mesh: str = MESH) -> list[metrics.Figures]:
    """The metrics of a run in this process."""
    launch.main(["train", *SMALL, "--mesh", mesh, "--sample", "0", "--out", str(out), *args])
    return metrics.read(out / metrics.FILE_NAME)


def losses(lines: list[metrics.Figures]) -> list[float]:
    """The loss of every step."""
    return [value for _, value in metrics.series(lines, "loss")]


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What is said of a run that cannot be: an error of one paragraph, and exit code 2."""
    with pytest.raises(SystemExit, match="2"):
        launch.main(["train", *SMALL, *args])
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and "Traceback" not in shown
    return shown
