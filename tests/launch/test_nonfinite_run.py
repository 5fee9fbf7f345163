"""A run stops at a non-finite loss, or skips the step; it reports the batch and the value's origin."""

from pathlib import Path

import numpy as np
import pytest

from sharding import checkpoint, launch
from sharding.launch import metrics
from sharding.launch.datasets import synthetic_clicks

BAD = 2
"""The batch that contains a nan."""


@pytest.fixture
def bad_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = synthetic_clicks.SyntheticClicks.train_batch

    def train_batch(self, step, rows=None):
        batch = original(self, step, rows)
        if step == BAD:
            batch.numbers[0, 0] = np.nan
        return batch

    monkeypatch.setattr(synthetic_clicks.SyntheticClicks, "train_batch", train_batch)


def train(out: Path, *args: str) -> None:
    options = ["--model", "dlrm-tiny", "--mesh", "data=2", "--batch", "8", "--steps", "5", "--eval-every", "0"]
    launch.main(["train", *options, "--checkpoint-every", "1", "--out", str(out), *args])


def test_stops_and_names_the_origin(bad_batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        train(tmp_path)
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: step {BAD + 1}\n") and "loss nan, gradient norm nan" in shown
    assert f"batch {BAD} of seed 0" in shown and "first nan in batch/numbers" in shown
    # Earlier checkpoints are unaffected.
    assert checkpoint.steps(tmp_path / "checkpoints")[-1] == BAD
    assert checkpoint.verify(tmp_path / "checkpoints", BAD) == {BAD: ""}


@pytest.mark.slow
def test_skips_the_step_and_continues(bad_batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(tmp_path, "--nonfinite", "skip")
    assert f"skipped step {BAD + 1}: loss nan" in capsys.readouterr().out
    lines = metrics.read(tmp_path / metrics.FILE_NAME)
    assert [step for step, _ in metrics.series(lines, "loss")] == [1, 2, 4, 5]
    assert metrics.series(lines, "skipped") == [(BAD + 1, 1.0)]
    before, after = (checkpoint.restore_named(tmp_path / "checkpoints", step) for step in (BAD + 1, BAD + 2))
    assert all(np.isfinite(array).all() for array in after.values())
    assert int(before["step"]) == BAD + 1 and int(after["step"]) == BAD + 2
