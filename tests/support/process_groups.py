"""Multi-process runs started through the command line, for fault-injection tests."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from support.short_runs import losses

from sharding import checkpoint, launch
from sharding.distributed import processes
from sharding.launch import metrics

TRAIN = ["train", "--mesh", "data=2,tensor=2", "--batch", "12", "--sample", "0", "--eval-every", "0", "--scan"]
"""A run of the tiny GPT: about 15 s to its first step, then 0.25 s per step."""

STEPS, CHECKPOINT_EVERY, FAULT_STEP = 30, 5, 13
"""Number of steps, steps between checkpoints, and the step after which a fault is injected."""

WAIT = 180.0
"""Timeout of every wait, in seconds."""


@dataclass(kw_only=True)
class Launched:
    """A running `sharding launch` with these arguments; a context manager that kills all its processes on exit."""

    args: Sequence[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "launch.log"
        # An environment variable identifies all descendant processes of this launch.
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
        self.kill(self.pids())

    @property
    def text(self) -> str:
        """Output so far."""
        return self.log.read_text(errors="replace")

    def pids(self, *, command: str = "", **variables: str) -> list[int]:
        """Live processes of this launch with these environment variables and this text in their command line."""
        wanted = {f"{name}={value}" for name, value in (variables | {"TEST_GROUP": self.mark}).items()}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                has_variables = wanted <= set((folder / "environ").read_text(errors="replace").split("\0"))
                if has_variables and state != "Z" and command in (folder / "cmdline").read_text(errors="replace"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    @staticmethod
    def kill(pids: Iterable[int]) -> None:
        """Kills the processes that have not ended by themselves."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def worker(self, number: int) -> int:
        """PID of a worker process."""
        found: list[int] = []

        def is_found() -> bool:
            found[:] = self.pids(**{processes.PROCESS: str(number)})
            return len(found) == 1

        self.wait_until(is_found, f"one process {number}")  # one that forks looks like two for a moment
        return found[0]

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Waits until a condition is true; fails after `WAIT` seconds."""
        deadline = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < deadline, f"timed out waiting for {what}:\n{self.text}"
            time.sleep(0.05)

    def wait_for_output(self, text: str) -> None:
        """Waits until this text is printed."""
        self.wait_until(lambda: text in self.text or self.process.poll() is not None, text)
        assert text in self.text, self.text

    def wait_for_step(self, step: int, out: Path) -> None:
        """Waits until a run has finished a step."""
        self.wait_until(lambda: self.process.poll() is not None or last_step(out) >= step, f"step {step}")
        assert last_step(out) >= step, self.text

    def wait_for_exit(self) -> int:
        """The exit code, after all processes have ended."""
        try:
            code = self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end:\n{self.text}") from None
        self.wait_until(lambda: not self.pids(), "the last process to end")
        return code


def last_step(out: Path) -> int:
    """The last step in a run's metrics; 0 if none."""
    path = out / metrics.FILE_NAME
    return max((int(line["step"]) for line in metrics.read(path)), default=0) if path.exists() else 0


def run_args(out: Path, *more: str, steps: int = STEPS, every: int = CHECKPOINT_EVERY) -> list[str]:
    """Command-line arguments of a run."""
    return [*TRAIN, "--steps", str(steps), "--checkpoint-every", str(every), "--out", str(out), *more]


def uninterrupted_losses(out: Path, *, steps: int = STEPS, every: int = CHECKPOINT_EVERY) -> list[float]:
    """Losses of the same run in this process, without faults."""
    launch.main(run_args(out, steps=steps, every=every))
    return losses(metrics.read(out / metrics.FILE_NAME))


def check_complete_run(out: Path, expected_losses: Sequence[float]) -> None:
    """Asserts that a run has each step's loss exactly once and a valid final checkpoint."""
    lines, steps = metrics.read(out / metrics.FILE_NAME), len(expected_losses)
    assert [step for step, _ in metrics.series(lines, "loss")] == list(range(1, steps + 1))
    np.testing.assert_allclose(losses(lines), expected_losses, rtol=1e-5)
    assert checkpoint.steps(out / "checkpoints")[-1] == steps
    assert not any(checkpoint.verify(out / "checkpoints").values())


def fake_ssh(folder: Path) -> tuple[Path, Path]:
    """A stand-in for ssh that runs commands locally, and a file whose existence makes host `b` unreachable.

    Processes of a host have its name in the environment variable HOST_OF_TEST.
    """
    ssh, gone = folder / "ssh", folder / "gone"
    ssh.write_text(
        f'#!/bin/sh\n[ "$1" = b ] && [ -e {gone} ] && exit 255\nexport HOST_OF_TEST=$1\nshift\nexec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    return ssh, gone
