"""Runs of a few steps from end to end, in this process and as a process of their own."""

import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import pytest

from sharding import checkpoint, launch
from sharding.launch import metrics

STEPS = 6
SMALL = ["--steps", str(STEPS), "--batch", "8", "--eval-every", "3", "--checkpoint-every", "3", "--lr", "1e-3"]
MESH = "data=2,fsdp=2,tensor=2"


def train(out: Path, *args: str, mesh: str = MESH) -> list[metrics.Figures]:
    launch.main(["train", *SMALL, "--mesh", mesh, "--sample", "0", "--out", str(out), *args])
    return metrics.read(out / metrics.FILE_NAME)


def losses(lines: list[metrics.Figures]) -> list[float]:
    return [value for _, value in metrics.series(lines, "loss")]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train(out)
    return out


@pytest.fixture
def half_run(whole_run: Path, tmp_path: Path) -> Path:
    """The run as if it had been killed after its checkpoint of step 3."""
    out = tmp_path / "half"
    shutil.copytree(whole_run, out)
    shutil.rmtree(out / "checkpoints" / str(STEPS))
    return out


def test_what_a_run_leaves(whole_run: Path):
    lines = metrics.read(whole_run / metrics.FILE_NAME)
    assert [step for step, _ in metrics.series(lines, "loss")] == list(range(1, STEPS + 1))
    assert [step for step, _ in metrics.series(lines, "heldout_bits_per_byte")] == [3, 6]
    assert losses(lines)[-1] < losses(lines)[0]
    assert checkpoint.latest_step(whole_run / "checkpoints") == STEPS
    assert checkpoint.extra(whole_run / "checkpoints")["model"]["name"] == "gpt-tiny"
    assert xml.parse(whole_run / "loss.svg").getroot().tag.endswith("svg")
    page = (whole_run / "report.html").read_text()
    for part in ("bits per byte", "<svg", "corpus sha256", "model_config.layers", "How the train step is split"):
        assert part in page


def test_resumed_on_the_same_mesh_the_curve_is_the_same(whole_run: Path, half_run: Path):
    whole, resumed = metrics.read(whole_run / metrics.FILE_NAME), train(half_run, "--resume")
    assert losses(resumed) == losses(whole)
    assert metrics.series(resumed, "heldout_bits_per_byte") == metrics.series(whole, "heldout_bits_per_byte")


@pytest.mark.parametrize(
    "mesh", ["tensor=4", pytest.param("fsdp=8", marks=pytest.mark.slow), pytest.param("data=1", marks=pytest.mark.slow)]
)
def test_resumed_on_another_mesh_the_curve_is_close(whole_run: Path, half_run: Path, mesh: str):
    whole, resumed = metrics.read(whole_run / metrics.FILE_NAME), train(half_run, "--resume", mesh=mesh)
    assert losses(resumed)[:3] == losses(whole)[:3]
    np.testing.assert_allclose(losses(resumed)[3:], losses(whole)[3:], rtol=1e-4)


def test_the_mesh_does_not_change_the_curve(whole_run: Path, tmp_path: Path):
    alone = train(tmp_path, mesh="data=1")
    np.testing.assert_allclose(losses(alone), losses(metrics.read(whole_run / metrics.FILE_NAME)), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--scan", "--remat"], ["--dtype", "bfloat16"], ["--dropout", "0.1"], ["--kv-heads", "2"]],
    ids=lambda options: options[0],
)
def test_other_models(options: list[str], tmp_path: Path):
    lines = train(tmp_path, *options, "--steps", "3")
    assert losses(lines)[-1] < losses(lines)[0] - 0.1


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        launch.main(["train", *SMALL, *args])
    return capsys.readouterr().err


def test_unknown_model(capsys, tmp_path):
    shown = refused(capsys, "--model", "gpt-tinny", "--out", str(tmp_path))
    assert "--model gpt-tiny" in shown


def test_model_that_does_not_fit_together(capsys, tmp_path):
    assert "kv_heads" in refused(capsys, "--kv-heads", "3", "--out", str(tmp_path))


def test_more_devices_than_there_are(capsys, tmp_path):
    shown = refused(capsys, "--mesh", "data=4096", "--batch", "4096", "--devices", "8", "--out", str(tmp_path))
    assert "4096" in shown and "--mesh data=8" in shown


def test_out_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "--out" in refused(capsys, "--out", str(tmp_path / "file" / "inner"))


def test_resume_without_a_checkpoint(capsys, tmp_path):
    assert "no checkpoint" in refused(capsys, "--resume", "--out", str(tmp_path))


def test_resume_with_another_model(capsys, whole_run):
    shown = refused(capsys, "--resume", "--kv-heads", "2", "--mesh", MESH, "--out", str(whole_run))
    assert "model_config.kv_heads was 8, is now 2" in shown


def test_resume_when_all_is_done(whole_run: Path):
    before = losses(metrics.read(whole_run / metrics.FILE_NAME))
    assert losses(train(whole_run, "--resume")) == before


def test_a_new_run_does_not_mix_with_an_old_one(half_run: Path):
    lines = train(half_run, "--steps", "1", "--seed", "1", mesh="data=1")
    assert [step for step, _ in metrics.series(lines, "loss")] == [1]
    assert checkpoint.latest_step(half_run / "checkpoints") == 1
    assert checkpoint.extra(half_run / "checkpoints")["seed"] == 1
    assert checkpoint.latest_step(half_run / "checkpoints-before") == 3


def command(out: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "sharding.launch", "train", *SMALL, "--out", str(out), *args]


def test_a_process_of_its_own(tmp_path: Path):
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_a_run_that_can_be_resumed(number: signal.Signals, tmp_path: Path):
    long = command(tmp_path, "--mesh", "data=2", "--steps", "100000", "--sample", "0")
    process = subprocess.Popen(long, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(tmp_path / metrics.FILE_NAME, 2)
    process.send_signal(number)
    shown, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "--resume goes on from there" in shown
    lines = metrics.read(tmp_path / metrics.FILE_NAME)
    assert checkpoint.latest_step(tmp_path / "checkpoints") == lines[-1]["step"]


def wait_for_steps(path: Path, count: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if path.exists() and len(metrics.read(path)) >= count:
            return
        time.sleep(0.1)
    raise TimeoutError(path)
