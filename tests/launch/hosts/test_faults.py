"""Fault injection: a run whose processes are killed, stalled, hung or preempted recovers, with unchanged losses."""

import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from support.process_groups import (
    CHECKPOINT_EVERY,
    FAULT_STEP,
    Launched,
    check_complete_run,
    fake_ssh,
    last_step,
    run_args,
)

from sharding import checkpoint
from sharding.distributed.processes import free_port

STUCK = """
import os, sys, time
from sharding import launch
from sharding.launch.datasets import standard_library

original = standard_library.train_batch

def train_batch(*args, step, **rest):
    if step == {at} and os.environ["SHARDING_PROCESS"] == "1" and os.environ["SHARDING_RESTART"] == "0":
        time.sleep(1000)
    return original(*args, step=step, **rest)

standard_library.train_batch = train_batch
launch.main(sys.argv[1:])
"""


class Fault(NamedTuple):
    """A signal to one of several processes, and the message expected."""

    number: signal.Signals
    process: int
    processes: int
    message: str
    mesh: str = "data=2,tensor=2"


FAULTS = {
    "a worker is killed": Fault(signal.SIGKILL, 1, 2, "process 1 was killed by SIGKILL"),
    "the coordinator is killed": Fault(signal.SIGKILL, 0, 2, "process 0 was killed by SIGKILL"),
    "one of four is killed": Fault(signal.SIGKILL, 2, 4, "process 2 was killed by SIGKILL"),
    "one of three is killed": Fault(signal.SIGKILL, 2, 3, "process 2 was killed by SIGKILL", "data=3,tensor=2"),
    "a worker stalls": Fault(signal.SIGSTOP, 1, 2, "restart 1 of 3"),
    "the coordinator stalls": Fault(signal.SIGSTOP, 0, 2, "restart 1 of 3"),
}


@pytest.mark.slow  # the notebook on hosts covers a kill in the quick suite
@pytest.mark.parametrize("name", FAULTS)
def test_recovers_after(name: str, tmp_path: Path, uninterrupted: list[float]):
    fault, out = FAULTS[name], tmp_path / "run"
    args = ["launch", "--processes", str(fault.processes), "--", *run_args(out, "--mesh", fault.mesh)]
    with Launched(args=args, folder=tmp_path) as run:
        run.wait_for_step(FAULT_STEP, out)
        os.kill(run.worker(fault.process), fault.number)
        assert run.wait_for_exit() == 0
    assert fault.message in run.text
    # Only the steps after the newest checkpoint are repeated.
    resumed = int(run.text.split("resumed after step ")[1].split()[0])
    assert FAULT_STEP - FAULT_STEP % CHECKPOINT_EVERY - CHECKPOINT_EVERY <= resumed
    check_complete_run(out, uninterrupted)


@pytest.mark.slow
def test_a_process_that_is_stuck_in_python(tmp_path: Path, uninterrupted: list[float]):
    out, script = tmp_path / "run", tmp_path / "stuck.py"
    script.write_text(STUCK.format(at=FAULT_STEP))
    with Launched(args=["launch", "--step-timeout", "5", "--", str(script), *run_args(out)], folder=tmp_path) as run:
        assert run.wait_for_exit() == 0
    assert f"no step for 5 s since step {FAULT_STEP - 1}" in run.text and "in train_batch" in run.text
    check_complete_run(out, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_sigterm_on_one_host_stops_all_with_a_checkpoint(process: int, tmp_path: Path, uninterrupted: list[float]):
    out = tmp_path / "run"
    with Launched(args=["launch", "--", *run_args(out)], folder=tmp_path) as run:
        run.wait_for_step(FAULT_STEP, out)
        os.kill(run.worker(process), signal.SIGTERM)
        assert run.wait_for_exit() == 0
    stopped = checkpoint.steps(out / "checkpoints")[-1]
    assert stopped >= FAULT_STEP and f"stopped after step {stopped}; continue with --resume" in run.text
    with Launched(args=["launch", "--", *run_args(out, "--resume")], folder=tmp_path) as run:
        assert run.wait_for_exit() == 0
    check_complete_run(out, uninterrupted)


@pytest.mark.slow
def test_a_host_gone_for_good(tmp_path: Path, uninterrupted: list[float]):
    out = tmp_path / "run"
    ssh, gone = fake_ssh(tmp_path)
    hosts = ["--hosts", "a,b", "--ssh", str(ssh), "--coordinator", f"127.0.0.1:{free_port()}"]
    options = [*hosts, "--devices-per-process", "2", "--elastic"]
    with Launched(args=["launch", *options, "--", *run_args(out)], folder=tmp_path) as run:
        run.wait_for_step(FAULT_STEP, out)
        gone.touch()
        run.kill(run.pids(HOST_OF_TEST="b"))
        assert run.wait_for_exit() == 0, run.text
    assert "continuing without b" in run.text and "data=1,tensor=2" in run.text
    check_complete_run(out, uninterrupted)


DIFFERENT = {
    "another program": (
        "from sharding.launch import optimizer; original = optimizer.optimizer\n"
        "optimizer.optimizer = lambda o, s: __import__('optax').chain(original(o, s), __import__('optax').scale(2.0))",
        "process 1 differs from process 0 in program",
    ),
    "another version of JAX": (
        "import sharding; module = sys.modules['sharding.distributed.consistency']; original = module.version\n"
        "module.version = lambda name: '0.9.9' if name == 'jax' else original(name)",
        "process 1 differs from process 0 in jax: 0.9.9, not",
    ),
    "another order of the data": (
        "from sharding.launch.datasets import standard_library; original = standard_library.train_batch\n"
        "standard_library.train_batch = lambda *a, step, **r: original(*a, step=step + 1, **r)",
        "process 1 differs from process 0 in data order",
    ),
    "other flags": (
        "os.environ['XLA_FLAGS'] = '--xla_cpu_enable_fast_math=true'",
        "process 1 differs from process 0 in XLA_FLAGS: --xla_cpu_enable_fast_math=true, not none",
    ),
    "other settings": ("sys.argv += ['--lr', '0.5']", "process 1 differs from process 0 in settings"),
}


@pytest.mark.parametrize(
    "name", [name if name == "another program" else pytest.param(name, marks=pytest.mark.slow) for name in DIFFERENT]
)
def test_a_differing_host_is_named(name: str, tmp_path: Path):
    change, message = DIFFERENT[name]
    script = tmp_path / "different.py"
    lines = [f"    {line}" for line in change.splitlines()]
    head = ["import os, sys", "if os.environ['SHARDING_PROCESS'] == '1':", *lines]
    script.write_text("\n".join([*head, "from sharding import launch", "launch.main(sys.argv[1:])"]))
    with Launched(
        args=[
            "launch",
            "--processes",
            "3",
            "--",
            str(script),
            *run_args(tmp_path / "run", "--mesh", "data=3", "--batch", "6"),
        ],
        folder=tmp_path,
    ) as run:
        assert run.wait_for_exit() == 2
    assert message in run.text and "Traceback" not in run.text and "[launch] restart" not in run.text
    assert last_step(tmp_path / "run") == 0
