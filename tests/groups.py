"""Programs of several processes, started as a user starts them, for tests to disturb."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from runs import losses

from sharding import checkpoint, launch, processes
from sharding.launch import metrics

TRAIN = ["train", "--mesh", "data=2,tensor=2", "--batch", "12", "--sample", "0", "--eval-every", "0", "--scan"]
"""A run of the tiny GPT: some 15 seconds until its first step, then a quarter of a second each."""

STEPS, EVERY, AT = 30, 5, 13
"""Steps of a run, steps between checkpoints, and the step after which it is disturbed."""

WAIT = 180.0
"""Seconds until a test gives up."""


@dataclass(kw_only=True)
class Launched:
    """`sharding launch` with these arguments, while it runs. A context manager that leaves nothing behind."""

    args: Sequence[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "launch.log"
        # One mark finds all processes that came of this launch, wherever they hang.
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        dropped = ("NPROC", "PYTEST_XDIST_WORKER")
        env = {name: value for name, value in os.environ.items() if name not in dropped}
        env |= {"JAX_PLATFORMS": "cpu", "TEST_GROUP": self.mark, **self.environment}
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "sharding.launch", *self.args]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=self.cwd)
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)

    @property
    def text(self) -> str:
        """What was printed so far."""
        return self.log.read_text(errors="replace")

    def pids(self, **variables: str) -> list[int]:
        """The processes of this launch that have these environment variables, those that ended left out."""
        wanted = {f"{name}={value}" for name, value in (variables | {"TEST_GROUP": self.mark}).items()}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if wanted <= set((folder / "environ").read_text(errors="replace").split("\0")) and state != "Z":
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def worker(self, number: int) -> int:
        """The pid of a process of the program."""
        (pid,) = self.pids(**{processes.PROCESS: str(number)})
        return pid

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + WAIT
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.text}"
            time.sleep(0.05)

    def until_said(self, text: str) -> None:
        """Wait until this was printed."""
        self.until(lambda: text in self.text or self.process.poll() is not None, text)
        assert text in self.text, self.text

    def until_step(self, step: int, out: Path) -> None:
        """Wait until a run has finished a step."""
        self.until(lambda: self.process.poll() is not None or last_step(out) >= step, f"step {step}")
        assert last_step(out) >= step, self.text

    def end(self) -> int:
        """The exit code, once all has ended."""
        try:
            code = self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end:\n{self.text}") from None
        self.until(lambda: not self.pids(), "the last process to end")
        return code


def last_step(out: Path) -> int:
    """The newest step of a run's metrics; 0 for none."""
    path = out / metrics.FILE_NAME
    return max((int(line["step"]) for line in metrics.read(path)), default=0) if path.exists() else 0


def run_args(out: Path, *more: str, steps: int = STEPS, every: int = EVERY) -> list[str]:
    """Of a run of so many steps."""
    return [*TRAIN, "--steps", str(steps), "--checkpoint-every", str(every), "--out", str(out), *more]


def losses_alone(out: Path, *, steps: int = STEPS, every: int = EVERY) -> list[float]:
    """Of the same run by one process, this one, that nothing disturbs."""
    launch.main(run_args(out, steps=steps, every=every))
    return losses(metrics.read(out / metrics.FILE_NAME))


def check_whole(out: Path, undisturbed: Sequence[float]) -> None:
    """Fails unless a run has every step's loss once, and its last state."""
    lines, steps = metrics.read(out / metrics.FILE_NAME), len(undisturbed)
    assert [step for step, _ in metrics.series(lines, "loss")] == list(range(1, steps + 1))
    np.testing.assert_allclose(losses(lines), undisturbed, rtol=1e-5)
    assert checkpoint.steps(out / "checkpoints")[-1] == steps
    assert not any(checkpoint.verify(out / "checkpoints").values())


def shell_of_two_hosts(folder: Path) -> tuple[Path, Path]:
    """What runs commands here as if on another host, and a file: where it is there, the host `b` is gone.

    Processes of a host have its name in the environment variable HOST_OF_TEST.
    """
    ssh, gone = folder / "ssh", folder / "gone"
    ssh.write_text(
        f'#!/bin/sh\n[ "$1" = b ] && [ -e {gone} ] && exit 255\nexport HOST_OF_TEST=$1\nshift\nexec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    return ssh, gone
