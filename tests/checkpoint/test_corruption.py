"""After a kill, a full disk or file corruption, listed checkpoints stay good and errors name the newest good one."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.faulty_disk import flip_bit, largest_file, limit_file_size

from sharding import ShardingError, checkpoint

# Saves one step after another forever, with values derived from the step, and prints a step once it is complete.
SAVING = """
import sys
import jax, jax.numpy as jnp
from sharding import checkpoint

def state(step):
    return {f"w{i}": jax.random.bits(jax.random.key(step + i), (64, 1024), jnp.uint32) for i in range(8)}

first = (checkpoint.latest_step(sys.argv[1]) or 0) + 1
with checkpoint.Saver(sys.argv[1], keep=2) as saver:
    for step in range(first, 1_000_000):
        saver.save(step, state(step), {"step": step}, figure=1 / step if step % 3 else 0.5)
        print(step - 1, flush=True)
"""


def state(step: int) -> dict[str, jax.Array]:
    return {f"w{i}": jax.random.bits(jax.random.key(step + i), (64, 1024), jnp.uint32) for i in range(8)}


def kill_while_saving(folder: Path, after_seconds: float) -> None:
    """Starts a process that saves, and kills it some time into its second save or later, when the first is complete."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", SAVING, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() and process.stdout.readline()
        time.sleep(after_seconds)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)


def check_newest(folder: Path, least: int) -> int:
    newest = checkpoint.latest_step(folder)
    assert newest is not None and newest >= least
    assert checkpoint.extra(folder) == {"step": newest}
    for step in checkpoint.steps(folder):
        restored = checkpoint.restore(folder, state(0), step)
        jax.tree.map(np.testing.assert_array_equal, restored, state(step))
    return newest


def killed_at_random(folder: Path, times: int, seed: int) -> None:
    generator, newest = random.Random(seed), 1
    for _ in range(times):
        kill_while_saving(folder, generator.uniform(0, 0.4))
        newest = check_newest(folder, newest)


def test_killed_while_saving(tmp_path):
    killed_at_random(tmp_path, times=1, seed=0)


@pytest.mark.slow
def test_killed_twenty_times_while_saving(tmp_path):
    killed_at_random(tmp_path, times=20, seed=1)


def noise(seed: int) -> dict[str, jax.Array]:
    return {"a": jax.random.bits(jax.random.key(seed), (1 << 18,), jnp.uint32)}


@pytest.mark.parametrize("num_bytes", [1 << 16, 100], ids=["arrays", "documents"])
def test_a_full_disk(num_bytes: int, tmp_path):
    saver = checkpoint.Saver(tmp_path, keep=1)
    saver.save(1, noise(1))
    saver.wait()
    with (
        limit_file_size(num_bytes),
        pytest.raises(ShardingError, match="required: a writable directory with space for a checkpoint") as caught,
    ):
        saver.save(2, noise(2))
        saver.wait()
    assert "complete checkpoints: steps 1" in str(caught.value)
    saver.close()
    assert checkpoint.steps(tmp_path) == [1]
    jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(tmp_path, noise(0)), noise(1))
    # Once there is space again, the step can be saved to the same directory.
    checkpoint.save(tmp_path, 2, noise(2)).wait()
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_process_whose_save_failed_waits_for_no_other(tmp_path, monkeypatch):
    """The others are at another barrier, and Orbax waits for twenty minutes."""
    errors = []
    monkeypatch.setattr(ocp.multihost, "get_barrier_sync_fn", lambda **_: lambda **_: errors.append(sys.exception()))
    saver = checkpoint.Saver(tmp_path)
    with limit_file_size(1 << 16):
        saver.save(1, noise(1))
        assert errors, "barriers are no longer those of the saver"
        with pytest.raises(ShardingError, match="required: a writable directory"):
            saver.wait()
    saver.close()
    assert errors == [None] * len(errors)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that every user can access: that of pytest is private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Runs as a user subject to file modes."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_read_only_directory(open_folder: Path):
    checkpoint.save(open_folder, 1, noise(1)).wait()
    open_folder.chmod(0o555)
    try:
        with not_root():
            jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(open_folder, noise(0)), noise(1))
            with pytest.raises(ShardingError, match="required: a writable directory") as caught:
                checkpoint.save(open_folder, 2, noise(2)).wait()
    finally:
        open_folder.chmod(0o755)
    assert "complete checkpoints: steps 1" in str(caught.value)
    assert checkpoint.steps(open_folder) == [1]


def test_file_instead_of_the_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardingError, match="required: a writable directory"):
        checkpoint.save(tmp_path / "file", 1, noise(1))
    assert checkpoint.steps(tmp_path / "file") == []


CORRUPTIONS: dict[str, Callable[[Path], None]] = {
    "bit flip": lambda folder: flip_bit(largest_file(folder)),
    "truncated": lambda folder: os.truncate(largest_file(folder), largest_file(folder).stat().st_size // 2),
    "emptied": lambda folder: os.truncate(largest_file(folder), 0),
    "file removed": lambda folder: largest_file(folder).unlink(),
    "arrays removed": lambda folder: shutil.rmtree(folder / "arrays"),
    "facts removed": lambda folder: shutil.rmtree(folder / "facts"),
    "facts not JSON": lambda folder: next((folder / "facts").glob("m*")).write_text('{"a": ') and None,
    "all removed": lambda folder: shutil.rmtree(folder) or folder.mkdir(),
}
QUICK = ("bit flip", "file removed", "facts not JSON")


@pytest.mark.parametrize(
    "corrupt",
    [pytest.param(f, marks=[pytest.mark.slow] * (name not in QUICK), id=name) for name, f in CORRUPTIONS.items()],
)
def test_error_names_the_newest_good_checkpoint(corrupt: Callable[[Path], None], tmp_path):
    with checkpoint.Saver(tmp_path, keep=4) as saver:
        for step in (1, 2, 3):
            saver.save(step, noise(step))
    for step in (2, 3):
        corrupt(tmp_path / str(step))
    with pytest.raises(ShardingError, match="step 1, the newest older checkpoint that is not corrupted"):
        checkpoint.restore(tmp_path, noise(0), 3)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(tmp_path, noise(0), 1), noise(1))
    found = checkpoint.restore_newest(tmp_path, noise(0))
    jax.tree.map(np.testing.assert_array_equal, found.state, noise(1))
    assert found.step == 1 and list(found.damaged) == [3, 2]
    wrong = checkpoint.verify(tmp_path)
    assert list(wrong) == [3, 2, 1] and wrong[3] and wrong[2] and not wrong[1]
    assert checkpoint.verify(tmp_path, 2) == {2: wrong[2]}
    corrupt(tmp_path / "1")
    with pytest.raises(ShardingError, match="required: a checkpoint that is not corrupted"):
        checkpoint.restore_newest(tmp_path, noise(0))
    with pytest.raises(ShardingError, match="all older checkpoints are corrupted too"):
        checkpoint.restore(tmp_path, noise(0), 3)
    with pytest.raises(ShardingError, match="no older checkpoint exists"):
        checkpoint.restore(tmp_path, noise(0), 1)


def corrupted(folder: Path, generator: random.Random) -> str:
    """Corrupts one file of a directory at random and returns a description."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path, other = generator.sample(files, 2)
    data = bytearray(path.read_bytes())
    at, how = generator.randrange(len(data)), generator.choice(["flipped", "zeroed", "cut", "removed", "swapped"])
    if how == "removed":
        path.unlink()
    elif how == "swapped":
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        if how == "flipped":
            data[at] ^= 1 << generator.randrange(8)
        elif how == "zeroed":
            data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        else:
            del data[at:]
        path.write_bytes(data)
    return f"{path.relative_to(folder)} {how} at {at}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 7))])
def test_corrupted_values_are_never_restored(seed: int, tmp_path):
    """For seven corrupted copies per seed, 49 in all: the newest checkpoint as saved, or the one before."""
    with checkpoint.Saver(tmp_path / "intact") as saver:
        for step in (1, 2):
            saver.save(step, noise(step), {"step": step})
    generator = random.Random(seed)
    for copy in range(7):
        folder = tmp_path / str(copy)
        shutil.copytree(tmp_path / "intact", folder)
        how = corrupted(folder / "2", generator)
        found, wrong = checkpoint.restore_newest(folder, noise(0)), checkpoint.verify(folder)
        assert found.step == 2 or found.damaged, how
        for name, array in noise(found.step).items():
            np.testing.assert_array_equal(found.state[name], array, err_msg=how)
        assert wrong[1] == "" and (wrong[2] == "" or found.step == 1 or "extra" in wrong[2]), how
        if not wrong[2]:
            assert checkpoint.extra(folder, 2) == {"step": 2}, how


def test_output_is_one_line(tmp_path):
    """Instead of the pages that Orbax logs for each unreadable array."""
    with checkpoint.Saver(tmp_path) as saver:
        for step in (1, 2):
            saver.save(step, state(step))
    for path in (tmp_path / "2" / "arrays").rglob("d/*"):
        os.truncate(path, 100)
    program = "import sys; from sharding import checkpoint; print(checkpoint.verify(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("{2: '") and done.stdout.count("\n") == 1 and len(done.stdout) < 300
    assert done.stderr == ""


def test_corrupted_document(tmp_path):
    with checkpoint.Saver(tmp_path) as saver:
        saver.save(1, noise(1), "one")
        saver.save(2, noise(2), "two")
    file = next((tmp_path / "2" / "extra").glob("m*"))
    text = file.read_text()
    assert "two" in text
    file.write_text(text.replace("two", "twp"))
    with pytest.raises(ShardingError, match="extra: checksum mismatch"):
        checkpoint.extra(tmp_path)
    assert checkpoint.verify(tmp_path)[2].startswith("extra: ")
    file.write_text("")
    with pytest.raises(ShardingError, match="step 1, the newest older checkpoint that is not corrupted"):
        checkpoint.extra(tmp_path)
    assert checkpoint.extra(tmp_path, 1) == "one"
    with pytest.raises(ShardingError, match="step 1, the newest older checkpoint that is not corrupted"):
        checkpoint.describe(tmp_path)
