"""Runs of a few steps for the tests of the command line."""

from pathlib import Path

import pytest

from sharding import launch
from sharding.launch import metrics

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
