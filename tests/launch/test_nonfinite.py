"""A step whose loss is not finite: named with its batch and the line where it began; the run stops, or skips it."""

from pathlib import Path

import numpy as np
import pytest

from sharding import checkpoint, launch
from sharding.launch import clicks, metrics

BAD = 2
"""The batch that holds a number which is none."""


@pytest.fixture
def bad_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = clicks.HiddenClicks.train_batch

    def train_batch(self, step, rows=None):
        batch = whole(self, step, rows)
        if step == BAD:
            batch.numbers[0, 0] = np.nan
        return batch

    monkeypatch.setattr(clicks.HiddenClicks, "train_batch", train_batch)


def train(out: Path, *args: str) -> None:
    options = ["--model", "dlrm-tiny", "--mesh", "data=2", "--batch", "8", "--steps", "5", "--eval-every", "0"]
    launch.main(["train", *options, "--checkpoint-every", "1", "--out", str(out), *args])


def test_it_stops_and_says_where(bad_batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        train(tmp_path)
    said = capsys.readouterr().err
    assert said.startswith(f"error: step {BAD + 1}\n") and "the loss is nan" in said
    assert f"batch {BAD} of seed 0" in said and "first nan in batch/numbers" in said
    # What was saved before is as good as it was.
    assert checkpoint.steps(tmp_path / "checkpoints")[-1] == BAD
    assert checkpoint.verify(tmp_path / "checkpoints", BAD) == {BAD: ""}


@pytest.mark.slow
def test_it_skips_the_step_and_goes_on(bad_batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(tmp_path, "--nonfinite", "skip")
    assert f"step {BAD + 1} is skipped: the loss is nan" in capsys.readouterr().out
    lines = metrics.read(tmp_path / metrics.FILE_NAME)
    assert [step for step, _ in metrics.series(lines, "loss")] == [1, 2, 4, 5]
    assert metrics.series(lines, "skipped") == [(BAD + 1, 1.0)]
    before, after = (checkpoint.restore_named(tmp_path / "checkpoints", step) for step in (BAD + 1, BAD + 2))
    assert all(np.isfinite(array).all() for array in after.values())
    assert int(before["step"]) == BAD + 1 and int(after["step"]) == BAD + 2
