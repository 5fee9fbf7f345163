"""Checkpoints of several processes: killed while they save, without room, and spoilt before they are read again."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk import flip, largest, small_disk
from groups import AT, Launched, check_whole, last_step, losses_alone, run_args

from sharding import checkpoint


def kill_while_saving(run: Launched, folder: Path, generator: random.Random) -> None:
    """Kill one of two processes at a random moment of a save that began since the newest start."""

    def begun() -> bool:
        # Orbax writes beside the place of a whole checkpoint. What an earlier start left is gone by the first step.
        return "loss" in run.text.rpartition("[launch] restart")[2] and any(folder.glob("[0-9]*.*"))

    run.until(lambda: begun() or run.process.poll() is not None, "a save to begin")
    assert run.process.poll() is None, run.text
    time.sleep(generator.uniform(0, 2))
    os.kill(run.worker(generator.randrange(2)), signal.SIGKILL)


@pytest.mark.slow
def test_killed_at_twenty_moments_while_they_save(tmp_path: Path):
    steps, kills, out, generator = 60, 20, tmp_path / "run", random.Random(0)
    folder = out / "checkpoints"
    undisturbed = losses_alone(tmp_path / "alone", steps=steps)
    said = run_args(out, "--keep", "100", steps=steps, every=2)
    with Launched(args=["launch", "--restarts", str(kills), "--", *said], folder=tmp_path) as run:
        for restart in range(1, kills + 1):
            kept = checkpoint.steps(folder)
            kill_while_saving(run, folder, generator)
            run.until_said(f"restart {restart} of {kills}")
            assert set(checkpoint.steps(folder)) >= set(kept)
        assert run.end() == 0, run.text
    check_whole(out, undisturbed)


@pytest.mark.slow
def test_a_disk_that_fills_up(tmp_path: Path, undisturbed: list[float]):
    with small_disk(tmp_path / "disk") as disk:
        out = disk.folder / "run"
        with Launched(args=["launch", "--", *run_args(out)], folder=tmp_path / "first") as run:
            run.until_step(AT, out)
            disk.fill()
            assert run.end() == 2, run.text
        kept = checkpoint.steps(out / "checkpoints")
        assert "make room" in run.text and "No space left on device" in run.text and "Traceback" not in run.text
        assert f"steps {', '.join(map(str, kept))}" in run.text and kept
        disk.empty()
        with Launched(args=["launch", "--", *run_args(out, "--resume")], folder=tmp_path / "second") as run:
            assert run.end() == 0, run.text
        check_whole(out, undisturbed)


@pytest.mark.slow
def test_a_disk_that_may_only_be_read(tmp_path: Path):
    with small_disk(tmp_path / "disk") as disk:
        disk.close()
        out = disk.folder / "run"
        with Launched(args=["launch", "--", *run_args(out)], folder=tmp_path) as run:
            assert run.end() == 2
        assert "the folder must be one to write in" in run.text and "Traceback" not in run.text


def zero(path: Path, at: int = 4096, count: int = 4096) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes(len(data[at : at + count])) + data[at + count :])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit": flip,
    "a zeroed block": zero,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "gone": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two processes that was told to stop on its way."""
    folder = tmp_path_factory.mktemp("stopped")
    out = folder / "run"
    with Launched(args=["launch", "--", *run_args(out)], folder=folder) as run:
        run.until_step(AT, out)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 0, run.text
    return out


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_the_newest_checkpoint_is_damaged(
    damage: Callable[[Path], None], tmp_path: Path, stopped: Path, undisturbed: list[float]
):
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    *_, before, newest = checkpoint.steps(out / "checkpoints")
    assert newest == last_step(out)
    damage(largest(out / "checkpoints" / str(newest) / "arrays"))
    with Launched(args=["launch", "--", *run_args(out, "--resume")], folder=tmp_path) as run:
        assert run.end() == 0, run.text
    assert f"resumed after step {before}" in run.text and f"step {newest}" in run.text
    check_whole(out, undisturbed)
