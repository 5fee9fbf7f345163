"""Checkpoints of several processes: killed while saving, on a full disk, and corrupted before a resume."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faulty_disk import flip_bit, largest_file, small_disk
from support.process_groups import FAULT_STEP, Launched, check_complete_run, last_step, run_args, uninterrupted_losses

from sharding import checkpoint


def kill_while_saving(run: Launched, folder: Path, generator: random.Random) -> None:
    """Kill one of two processes at a random moment of a save since the newest restart."""

    def begun() -> bool:
        # Orbax writes to a temporary folder, which a restart removes before its first step.
        return "loss" in run.text.rpartition("[launch] restart")[2] and any(folder.glob("[0-9]*.*"))

    run.wait_until(lambda: begun() or run.process.poll() is not None, "a save to begin")
    assert run.process.poll() is None, run.text
    time.sleep(generator.uniform(0, 2))
    os.kill(run.worker(generator.randrange(2)), signal.SIGKILL)


@pytest.mark.slow
def test_twenty_kills_while_saving(tmp_path: Path):
    steps, kills, out, generator = 120, 20, tmp_path / "run", random.Random(0)
    folder = out / "checkpoints"
    uninterrupted = uninterrupted_losses(tmp_path / "alone", steps=steps)
    args = run_args(out, "--keep", "100", steps=steps, every=2)
    with Launched(args=["launch", "--restarts", str(kills), "--", *args], folder=tmp_path) as run:
        for restart in range(1, kills + 1):
            kept = checkpoint.steps(folder)
            kill_while_saving(run, folder, generator)
            run.wait_for_output(f"restart {restart} of {kills}")
            assert set(checkpoint.steps(folder)) >= set(kept)
        assert run.wait_for_exit() == 0, run.text
    check_complete_run(out, uninterrupted)


@pytest.mark.slow
def test_a_full_disk_of_a_launch(tmp_path: Path, uninterrupted: list[float]):
    with small_disk(tmp_path / "disk") as disk:
        out = disk.folder / "run"
        with Launched(args=["launch", "--", *run_args(out)], folder=tmp_path / "first") as run:
            run.wait_for_step(FAULT_STEP, out)
            disk.fill()
            assert run.wait_for_exit() == 2, run.text
        kept = checkpoint.steps(out / "checkpoints")
        assert (
            "free space, or another directory" in run.text
            and "No space left on device" in run.text
            and "Traceback" not in run.text
        )
        assert f"steps {', '.join(map(str, kept))}" in run.text and kept
        disk.free()
        with Launched(args=["launch", "--", *run_args(out, "--resume")], folder=tmp_path / "second") as run:
            assert run.wait_for_exit() == 0, run.text
        check_complete_run(out, uninterrupted)


@pytest.mark.slow
def test_a_read_only_disk(tmp_path: Path):
    with small_disk(tmp_path / "disk") as disk:
        disk.remount_read_only()
        out = disk.folder / "run"
        with Launched(args=["launch", "--", *run_args(out)], folder=tmp_path) as run:
            assert run.wait_for_exit() == 2
        assert "a writable folder" in run.text and "Traceback" not in run.text


def zero(path: Path, at: int = 4096, count: int = 4096) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes(len(data[at : at + count])) + data[at + count :])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit": flip_bit,
    "a zeroed block": zero,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "gone": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two processes stopped by SIGTERM."""
    folder = tmp_path_factory.mktemp("stopped")
    out = folder / "run"
    with Launched(args=["launch", "--", *run_args(out)], folder=folder) as run:
        run.wait_for_step(FAULT_STEP, out)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_for_exit() == 0, run.text
    return out


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_the_newest_checkpoint_is_damaged(
    damage: Callable[[Path], None], tmp_path: Path, stopped: Path, uninterrupted: list[float]
):
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    *_, before, newest = checkpoint.steps(out / "checkpoints")
    assert newest == last_step(out)
    damage(largest_file(out / "checkpoints" / str(newest) / "arrays"))
    with Launched(args=["launch", "--", *run_args(out, "--resume")], folder=tmp_path) as run:
        assert run.wait_for_exit() == 0, run.text
    assert f"resumed after step {before}" in run.text and f"step {newest}" in run.text
    check_complete_run(out, uninterrupted)
