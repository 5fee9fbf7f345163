"""Short end-to-end runs, in this process and in a subprocess."""

import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import pytest
from support.short_runs import SMALL, STEPS, error_output, losses, train

from sharding import checkpoint
from sharding.launch import metrics


def test_files_of_a_run(finished_run: Path):
    lines = metrics.read(finished_run / metrics.FILE_NAME)
    assert [step for step, _ in metrics.series(lines, "loss")] == list(range(1, STEPS + 1))
    assert [step for step, _ in metrics.series(lines, "heldout_bits_per_byte")] == [3, 6]
    assert losses(lines)[-1] < losses(lines)[0]
    assert checkpoint.latest_step(finished_run / "checkpoints") == STEPS
    assert checkpoint.extra(finished_run / "checkpoints")["model"]["name"] == "gpt-tiny"
    assert xml.parse(finished_run / "loss.svg").getroot().tag.endswith("svg")
    page = (finished_run / "report.html").read_text()
    assert 'href="plan.html"' in page and 'role="status"' in (finished_run / "plan.html").read_text()
    for part in ("bits per byte", "<svg", "corpus sha256", "model_config.layers", "Sharding of the train step"):
        assert part in page


def test_the_mesh_does_not_change_the_curve(finished_run: Path, tmp_path: Path):
    one_device = train(tmp_path, mesh="data=1")
    np.testing.assert_allclose(losses(one_device), losses(metrics.read(finished_run / metrics.FILE_NAME)), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--scan", "--remat"],
        ["--dtype", "bfloat16"],
        ["--dropout", "0.1"],
        ["--kv-heads", "2"],
        ["--kernels", "pallas"],
    ],
    ids=lambda options: options[0],
)
def test_other_models(options: list[str], tmp_path: Path):
    lines = train(tmp_path, *options, "--steps", "3")
    assert losses(lines)[-1] < losses(lines)[0] - 0.1


def test_unknown_model(capsys, tmp_path):
    shown = error_output(capsys, "--model", "gpt-tinny", "--out", str(tmp_path))
    assert "--model gpt-tiny" in shown


def test_invalid_model(capsys, tmp_path):
    assert "kv_heads" in error_output(capsys, "--kv-heads", "3", "--out", str(tmp_path))


def test_more_devices_than_there_are(capsys, tmp_path):
    shown = error_output(capsys, "--mesh", "data=4096", "--batch", "4096", "--devices", "8", "--out", str(tmp_path))
    assert "4096" in shown and "--mesh data=8" in shown


def test_out_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "--out" in error_output(capsys, "--out", str(tmp_path / "file" / "inner"))


def test_a_new_run_does_not_mix_with_an_old_one(killed_run: Path):
    lines = train(killed_run, "--steps", "1", "--seed", "1", mesh="data=1")
    assert [step for step, _ in metrics.series(lines, "loss")] == [1]
    assert checkpoint.latest_step(killed_run / "checkpoints") == 1
    assert checkpoint.extra(killed_run / "checkpoints")["seed"] == 1
    assert checkpoint.latest_step(killed_run / "checkpoints-before") == 3


def command(out: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "sharding.launch", "train", *SMALL, "--out", str(out), *args]


def test_in_a_subprocess(tmp_path: Path):
    done = subprocess.run(
        command(tmp_path, "--mesh", "data=2,tensor=2", "--steps", "2", "--sample", "8"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^held out +\d\.\d\d bits per byte$", done.stdout, re.MULTILINE)
    assert "data=2,tensor=2 on 4 cpu devices" in done.stdout
    assert "def " in done.stdout
