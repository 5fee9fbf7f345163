"""A run that was stopped, killed or out of disk space resumes as if uninterrupted, on any mesh."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from support.faulty_disk import limit_file_size
from support.short_runs import MESH, SMALL, STEPS, error_output, losses, train

import sharding
from sharding import checkpoint
from sharding.launch import jitted_workload, metrics, progress, stop_signals, workloads
from sharding.launch.config.mesh_config import parse_mesh
from sharding.launch.config.model_config import ModelOptions
from sharding.launch.config.optimizer_config import Optimization

OTHER_MESHES = ["tensor=4", "fsdp=8", "data=1", "data=4", "fsdp=2,tensor=2", "data=2,tensor=4"]
FEW_QUICK = [
    pytest.param(mesh, marks=[pytest.mark.slow] * (mesh not in ("data=1", "fsdp=2,tensor=2"))) for mesh in OTHER_MESHES
]
ONE_QUICK = [OTHER_MESHES[0], *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in OTHER_MESHES[1:])]


def assert_same_parameters(one: Path, other: Path, step: int = STEPS) -> None:
    """The states of two runs are bitwise equal."""
    a, b = (checkpoint.restore_named(out / "checkpoints", step) for out in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def assert_same_run(one: Path, other: Path) -> None:
    """Every metric except timings and memory, and the final states of two runs, are bitwise equal."""
    machine = ("seconds", "tokens_per_second", "memory_bytes")
    a, b = (
        [
            {name: value for name, value in line.items() if name not in machine}
            for line in metrics.read(out / "metrics.jsonl")
        ]
        for out in (one, other)
    )
    assert a == b
    assert_same_parameters(one, other)


def test_on_the_same_mesh_bitwise(finished_run: Path, killed_run: Path):
    train(killed_run, "--resume")
    assert_same_run(finished_run, killed_run)


@pytest.mark.parametrize("mesh", ONE_QUICK)
def test_on_another_mesh_the_curve_is_close(mesh: str, finished_run: Path, killed_run: Path):
    finished, resumed = metrics.read(finished_run / metrics.FILE_NAME), train(killed_run, "--resume", mesh=mesh)
    assert losses(resumed)[:3] == losses(finished)[:3]
    np.testing.assert_allclose(losses(resumed)[3:], losses(finished)[3:], rtol=1e-4)


@pytest.mark.parametrize("mesh", FEW_QUICK)
def test_on_another_mesh_the_state_is_the_same(mesh: str, finished_run: Path):
    family, model = workloads.find(ModelOptions(scan=True))
    workload = family.build("gpt-tiny", model, Optimization(), steps=STEPS, seed=0)
    sizes = parse_mesh(mesh)
    with sharding.mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))]) as over:
        assert isinstance(over, jax.sharding.Mesh)
        like = jitted_workload.jit_workload(workload, over, batch_size=8).abstract_state()
    state = checkpoint.named_leaves(checkpoint.restore(finished_run / "checkpoints", like, 3))
    for name, array in checkpoint.restore_named(finished_run / "checkpoints", 3).items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)
        assert state[name].sharding.mesh == over
    progress = checkpoint.extra(finished_run / "checkpoints", 3)["progress"]
    assert (progress["step"], progress["examples"], int(state["step"])) == (3, 24, 3)


Moments = dict[str, tuple[type, str, Callable[..., bool]]]

# When a signal comes: inside which call.
MOMENTS: Moments = {
    "before the first step compiles": (progress.Console, "print", lambda self, text: text.startswith("mesh")),
    "after a step": (metrics.MetricsFile, "log", lambda self, step, figures: step == 2),
    "during an evaluation": (
        jitted_workload.JittedWorkload,
        "heldout",
        lambda self, state, batches: True,
    ),
    "after the last step": (metrics.MetricsFile, "log", lambda self, step, figures: step == STEPS),
}


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, signal.Signals], None]:
    """Sends this process a signal at one of the moments, once."""

    def arrange(moment: str, number: signal.Signals) -> None:
        owner, name, is_now = MOMENTS[moment]
        original, sent = getattr(owner, name), []

        def called(*args, **kwargs):
            if not sent and is_now(*args, **kwargs):
                sent.append(number)
                signal.raise_signal(number)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    return arrange


@pytest.mark.parametrize(
    ("moment", "number", "stopped_at"),
    [
        ("after a step", signal.SIGTERM, 2),
        pytest.param("before the first step compiles", signal.SIGINT, 0, marks=pytest.mark.slow),
        pytest.param("during an evaluation", signal.SIGTERM, 3, marks=pytest.mark.slow),
        pytest.param("after the last step", signal.SIGINT, STEPS, marks=pytest.mark.slow),
    ],
)
def test_a_signal_at_any_moment(
    moment: str, number: signal.Signals, stopped_at: int, finished_run: Path, tmp_path: Path, signal_at, capsys
):
    signal_at(moment, number)
    train(tmp_path)
    assert checkpoint.latest_step(tmp_path / "checkpoints") == stopped_at
    assert len(losses(metrics.read(tmp_path / metrics.FILE_NAME))) == stopped_at
    assert ("continue with --resume" in capsys.readouterr().out) == (stopped_at < STEPS)
    train(tmp_path, "--resume")
    assert_same_run(finished_run, tmp_path)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: a process started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_second_signal_stops_immediately():
    with stop_signals.StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt, match="^$"):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_kept_checkpoints(tmp_path: Path):
    options = ["--steps", "5", "--checkpoint-every", "1", "--eval-every", "2", "--keep", "1"]
    train(tmp_path, *options, mesh="data=1")
    figures = checkpoint.figures(tmp_path / "checkpoints")
    best = checkpoint.best_step(tmp_path / "checkpoints")
    assert checkpoint.steps(tmp_path / "checkpoints") == sorted({best, 5})
    lines = dict(metrics.series(metrics.read(tmp_path / metrics.FILE_NAME), "heldout_bits_per_byte"))
    assert best == min(lines, key=lambda step: lines[step]) and figures[best] == lines[best]


@pytest.mark.slow
def test_from_an_older_step(finished_run: Path, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(finished_run, out)
    train(out, "--resume", "--resume-step", "3")
    assert_same_run(finished_run, out)
    assert checkpoint.steps(out / "checkpoints-before") == [STEPS]


def test_without_a_checkpoint(capsys, tmp_path):
    assert "no checkpoint" in error_output(capsys, "--resume", "--out", str(tmp_path))


def test_with_another_model(capsys, finished_run: Path):
    shown = error_output(capsys, "--resume", "--kv-heads", "2", "--mesh", MESH, "--out", str(finished_run))
    assert "model_config.kv_heads was 8, is now 2" in shown


def test_a_finished_run(finished_run: Path):
    before = losses(metrics.read(finished_run / metrics.FILE_NAME))
    assert losses(train(finished_run, "--resume")) == before


def test_a_damaged_checkpoint(capsys, killed_run: Path, finished_run: Path):
    shutil.copytree(finished_run / "checkpoints" / "6", killed_run / "checkpoints" / "6")
    for path in (killed_run / "checkpoints" / "6" / "arrays" / "d").iterdir():
        os.truncate(path, path.stat().st_size // 2)
    again = ["--resume", "--mesh", MESH, "--sample", "0", "--out", str(killed_run)]
    assert "step 3, the newest older checkpoint that is not corrupted" in error_output(
        capsys, *again, "--resume-step", "6"
    )
    capsys.readouterr()
    assert losses(train(killed_run, "--resume")) == losses(metrics.read(finished_run / metrics.FILE_NAME))
    shown = " ".join(capsys.readouterr().out.split())
    assert "resumed after step 3" in shown
    assert "corrupted checkpoint of step 6, moved to checkpoints-before" in shown
    assert checkpoint.verify(killed_run / "checkpoints") == {6: "", 3: ""}


@pytest.fixture
def one_at_a_time() -> Iterator[None]:
    """No thread switches: Python 3.11 can't parse in two threads, and does so to show the traceback of Orbax's."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("num_bytes", "asked"), [(400, "write to --out"), pytest.param(1 << 16, "save step 6", marks=pytest.mark.slow)]
)
def test_a_full_disk(num_bytes: int, asked: str, capsys, one_at_a_time, killed_run: Path, finished_run: Path):
    with limit_file_size(num_bytes):
        shown = error_output(capsys, "--resume", "--mesh", MESH, "--sample", "0", "--out", str(killed_run))
    assert asked in shown and "complete checkpoints: steps 3" in shown
    train(killed_run, "--resume")
    assert_same_run(finished_run, killed_run)


def command(out: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "sharding.launch", "train", *SMALL, "--sample", "0", "--out", str(out), *args]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_process_that_gets_a_signal(number: signal.Signals, tmp_path: Path):
    """Stopped at some step and resumed, a run is bitwise equal to an uninterrupted one."""
    options = ["--mesh", "data=2,tensor=2", "--steps", "40"]
    stopped, finished = tmp_path / "stopped", tmp_path / "whole"
    process = subprocess.Popen(command(stopped, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(stopped / metrics.FILE_NAME, 4)
    process.send_signal(number)
    shown, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "continue with --resume" in shown
    assert "repeat to stop immediately" in errors
    last = metrics.read(stopped / metrics.FILE_NAME)[-1]["step"]
    assert checkpoint.latest_step(stopped / "checkpoints") == last < 40
    subprocess.run(command(stopped, *options, "--resume"), check=True, capture_output=True, timeout=300)
    subprocess.run(command(finished, *options), check=True, capture_output=True, timeout=300)
    machine = {"seconds", "tokens_per_second", "memory_bytes"}
    runs = [
        [{name: line[name] for name in line.keys() - machine} for line in metrics.read(out / metrics.FILE_NAME)]
        for out in (stopped, finished)
    ]
    assert runs[0] == runs[1]
    assert_same_parameters(stopped, finished, 40)


@pytest.mark.slow
def test_a_process_that_gets_two_signals(tmp_path: Path):
    long = command(tmp_path, "--mesh", "data=2", "--steps", "100000")
    process = subprocess.Popen(long, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(tmp_path / metrics.FILE_NAME, 4)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    # In either order, or merged into one, the signals end the run, and its checkpoint is complete.
    assert process.returncode in (0, 130, -signal.SIGTERM), errors
    newest = checkpoint.latest_step(tmp_path / "checkpoints")
    assert newest is not None and newest >= 3
    assert int(checkpoint.restore_named(tmp_path / "checkpoints", newest, prefix="step")["step"]) == newest


def wait_for_steps(path: Path, count: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if path.exists() and len(metrics.read(path)) >= count:
            return
        time.sleep(0.1)
    raise TimeoutError(path)
