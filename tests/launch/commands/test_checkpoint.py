"""`sharding checkpoint`, and runs initialized from another run's parameters."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.short_runs import STEPS, error_output, losses, train

from sharding import ShardingError, checkpoint, launch


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    launch.main(["checkpoint", *args])
    return capsys.readouterr().out


def test_inspect_shows_what_a_run_saved(finished_run: Path, capsys):
    text = shown(capsys, "inspect", str(finished_run), "--step", "3")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == f"folder {finished_run / 'checkpoints'}"
    assert lines[1].startswith("steps 3 (") and "6 (best, " in lines[1]
    assert lines[2].startswith("step 3: ") and "on disk" in lines[2]
    facts = checkpoint.describe(finished_run / "checkpoints", 3)
    assert f"{len(facts.arrays)} arrays, {facts.num_bytes / 1e6:.2f} MB" in lines[2]
    assert "params/embed/table 256x128 float32 [tensor, fsdp] 131,072" in lines
    assert "step scalar int32 [] 4" in lines
    assert "model.name gpt-tiny" in lines and "progress.step 3" in lines


def test_inspect_without_the_devices_that_saved(finished_run: Path):
    # One CPU device, as on a laptop; the run used eight.
    program = "import sys, jax; from sharding import launch; launch.main(sys.argv[1:]); print(len(jax.devices()))"
    command = [sys.executable, "-c", program, "checkpoint", "inspect", str(finished_run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step    6: " in done.stdout and done.stdout.splitlines()[-1] == "1"
    assert done.stderr == ""


def test_verify(finished_run: Path, tmp_path: Path, capsys):
    assert shown(capsys, "verify", str(finished_run)) == "step 6: ok\nstep 3: ok\n"
    shutil.copytree(finished_run / "checkpoints", tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints" / "6" / "extra")
    with pytest.raises(SystemExit, match="2"):
        launch.main(["checkpoint", "verify", str(tmp_path)])
    shown_error = capsys.readouterr().err
    assert "step 6: extra: unreadable, or checksum mismatch" in shown_error and "step 3: ok" in shown_error
    assert shown(capsys, "verify", str(tmp_path), "--step", "3") == "step 3: ok\n"


@pytest.mark.parametrize(
    "args", [["inspect", "DIR"], ["verify", "DIR"], ["export", "DIR", "--out", "x"]], ids=lambda args: args[0]
)
def test_a_folder_without_checkpoints(args: list[str], tmp_path: Path, capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["checkpoint", *[str(tmp_path) if arg == "DIR" else arg for arg in args]])
    assert "no checkpoint" in capsys.readouterr().err


def test_export_and_import_round_trip(finished_run: Path, tmp_path: Path, capsys):
    file = tmp_path / "x.safetensors"
    assert "tensors" in shown(capsys, "export", str(finished_run), "--out", str(file))
    assert "step 0" in shown(capsys, "import", str(file), "--out", str(tmp_path / "back"))
    before = checkpoint.restore_named(finished_run / "checkpoints", prefix="params/")
    after = checkpoint.restore_named(tmp_path / "back")
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
    assert "params/embed/table" in shown(capsys, "inspect", str(tmp_path / "back"))
    with pytest.raises(SystemExit, match="2"):
        launch.main(["checkpoint", "import", str(file), "--out", str(tmp_path / "back")])
    assert "a step without a checkpoint" in capsys.readouterr().err


def test_a_run_initialized_from_a_file(finished_run: Path, tmp_path: Path, capsys):
    file = tmp_path / "x.safetensors"
    checkpoint.export_tensors(finished_run / "checkpoints", file)
    lines = train(tmp_path / "on", "--init", str(file), "--steps", "1", mesh="data=1")
    first = json.loads((finished_run / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert losses(lines)[0] < first - 0.05
    text = error_output(
        capsys, "--init", str(file), "--kv-heads", "2", "--mesh", "data=1", "--out", str(tmp_path / "other")
    )
    assert "in the file float32" in text and "requested float32" in text


def test_batch_norm_refuses_gradient_accumulation(tmp_path: Path):
    from sharding.launch import workloads
    from sharding.launch.config.model_config import ModelOptions
    from sharding.launch.config.optimizer_config import Optimization

    family, model = workloads.find(ModelOptions(name="resnet-tiny"))
    workload = family.build("resnet-tiny", model, Optimization(accumulate=2), steps=STEPS, seed=0)
    with pytest.raises(ShardingError, match="--model resnet-tiny --accumulate 2"):
        workloads.check_accumulation(workload, 2)
    workloads.check_accumulation(workload, 1)
