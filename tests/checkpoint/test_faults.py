"""What a kill, a full disk and a damaged folder leave: what was listed stays good, and the error says what is."""

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
import pytest
from disk import flip, largest, no_room

from sharding import ShardingError, checkpoint

# Saves steps one after the other, each with values that its number gives, and never ends. When one is
# begun, the one before is whole, and it says so.
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
    """Start a process that saves, and kill it so long after it began its second save: the first one is whole."""
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


def test_killed_while_it_saves(tmp_path):
    killed_at_random(tmp_path, times=1, seed=0)


@pytest.mark.slow
def test_killed_at_twenty_moments_while_it_saves(tmp_path):
    killed_at_random(tmp_path, times=20, seed=1)


def noise(seed: int) -> dict[str, jax.Array]:
    return {"a": jax.random.bits(jax.random.key(seed), (1 << 18,), jnp.uint32)}


@pytest.mark.parametrize("num_bytes", [1 << 16, 100], ids=["arrays", "documents"])
def test_a_full_disk(num_bytes: int, tmp_path):
    saver = checkpoint.Saver(tmp_path, keep=1)
    saver.save(1, noise(1))
    saver.wait()
    with no_room(num_bytes), pytest.raises(ShardingError, match="with room for a checkpoint") as caught:
        saver.save(2, noise(2))
        saver.wait()
    assert "saved before and whole: steps 1" in str(caught.value)
    saver.close()
    assert checkpoint.steps(tmp_path) == [1]
    jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(tmp_path, noise(0)), noise(1))
    # With room again the same folder takes the step.
    checkpoint.save(tmp_path, 2, noise(2)).wait()
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can reach: pytest's own is closed to all but its user."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """As a user whom modes bind."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_may_only_be_read(open_folder: Path):
    checkpoint.save(open_folder, 1, noise(1)).wait()
    open_folder.chmod(0o555)
    try:
        with not_root():
            jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(open_folder, noise(0)), noise(1))
            with pytest.raises(ShardingError, match="must be one to write in") as caught:
                checkpoint.save(open_folder, 2, noise(2)).wait()
    finally:
        open_folder.chmod(0o755)
    assert "saved before and whole: steps 1" in str(caught.value)
    assert checkpoint.steps(open_folder) == [1]


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardingError, match="must be one to write in"):
        checkpoint.save(tmp_path / "file", 1, noise(1))
    assert checkpoint.steps(tmp_path / "file") == []


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda folder: flip(largest(folder)),
    "cut short": lambda folder: os.truncate(largest(folder), largest(folder).stat().st_size // 2),
    "emptied": lambda folder: os.truncate(largest(folder), 0),
    "a file gone": lambda folder: largest(folder).unlink(),
    "arrays gone": lambda folder: shutil.rmtree(folder / "arrays"),
    "facts gone": lambda folder: shutil.rmtree(folder / "facts"),
    "facts spoilt": lambda folder: next((folder / "facts").glob("m*")).write_text('{"a": ') and None,
    "all gone": lambda folder: shutil.rmtree(folder) or folder.mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_the_error_names_the_newest_that_is_good(damage: Callable[[Path], None], tmp_path):
    with checkpoint.Saver(tmp_path, keep=4) as saver:
        for step in (1, 2, 3):
            saver.save(step, noise(step))
    for step in (2, 3):
        damage(tmp_path / str(step))
    with pytest.raises(ShardingError, match="the checkpoint of step 1, which is whole"):
        checkpoint.restore(tmp_path, noise(0), 3)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(tmp_path, noise(0), 1), noise(1))
    found = checkpoint.restore_newest(tmp_path, noise(0))
    jax.tree.map(np.testing.assert_array_equal, found.state, noise(1))
    assert found.step == 1 and list(found.damaged) == [3, 2]
    wrong = checkpoint.verify(tmp_path)
    assert list(wrong) == [3, 2, 1] and wrong[3] and wrong[2] and not wrong[1]
    assert checkpoint.verify(tmp_path, 2) == {2: wrong[2]}
    damage(tmp_path / "1")
    with pytest.raises(ShardingError, match="one checkpoint must be whole"):
        checkpoint.restore_newest(tmp_path, noise(0))
    with pytest.raises(ShardingError, match="none of the older checkpoints is whole"):
        checkpoint.restore(tmp_path, noise(0), 3)
    with pytest.raises(ShardingError, match="no older checkpoint"):
        checkpoint.restore(tmp_path, noise(0), 1)


def damaged(folder: Path, generator: random.Random) -> str:
    """Damages one file of a folder at random, and says how."""
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
def test_nothing_that_is_wrong_comes_back(seed: int, tmp_path):
    """Of seven damaged copies each, 49 in all: the newest checkpoint as it was saved, or the one before."""
    with checkpoint.Saver(tmp_path / "whole") as saver:
        for step in (1, 2):
            saver.save(step, noise(step), {"step": step})
    generator = random.Random(seed)
    for copy in range(7):
        folder = tmp_path / str(copy)
        shutil.copytree(tmp_path / "whole", folder)
        how = damaged(folder / "2", generator)
        found, wrong = checkpoint.restore_newest(folder, noise(0)), checkpoint.verify(folder)
        assert found.step == 2 or found.damaged, how
        for name, array in noise(found.step).items():
            np.testing.assert_array_equal(found.state[name], array, err_msg=how)
        assert wrong[1] == "" and (wrong[2] == "" or found.step == 1 or "extra" in wrong[2]), how
        if not wrong[2]:
            assert checkpoint.extra(folder, 2) == {"step": 2}, how


def test_one_line_is_said_of_it(tmp_path):
    """In place of the pages that Orbax has for each array that it can't read."""
    with checkpoint.Saver(tmp_path) as saver:
        for step in (1, 2):
            saver.save(step, state(step))
    for path in (tmp_path / "2" / "arrays").rglob("d/*"):
        os.truncate(path, 100)
    program = "import sys; from sharding import checkpoint; print(checkpoint.verify(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("{2: '") and done.stdout.count("\n") == 1 and len(done.stdout) < 300
    assert done.stderr == ""


def test_a_document_that_is_spoilt(tmp_path):
    with checkpoint.Saver(tmp_path) as saver:
        saver.save(1, noise(1), "one")
        saver.save(2, noise(2), "two")
    file = next((tmp_path / "2" / "extra").glob("m*"))
    text = file.read_text()
    assert "two" in text
    file.write_text(text.replace("two", "twp"))
    with pytest.raises(ShardingError, match="its checksum differs"):
        checkpoint.extra(tmp_path)
    assert checkpoint.verify(tmp_path)[2].startswith("extra: ")
    file.write_text("")
    with pytest.raises(ShardingError, match="the checkpoint of step 1, which is whole"):
        checkpoint.extra(tmp_path)
    assert checkpoint.extra(tmp_path, 1) == "one"
    with pytest.raises(ShardingError, match="the checkpoint of step 1, which is whole"):
        checkpoint.describe(tmp_path)
