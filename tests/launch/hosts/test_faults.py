"""A run whose processes are killed, stopped, stuck or told to stop goes on by itself with the losses of a whole run."""

import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from groups import AT, EVERY, Launched, check_whole, last_step, run_args, shell_of_two_hosts

from sharding import checkpoint
from sharding.processes import free_port

STUCK = """
import os, sys, time
from sharding import launch
from sharding.launch import corpus

whole = corpus.train_batch

def train_batch(*args, step, **rest):
    if step == {at} and os.environ["SHARDING_PROCESS"] == "1" and os.environ["SHARDING_RESTART"] == "0":
        time.sleep(1000)
    return whole(*args, step=step, **rest)

corpus.train_batch = train_batch
launch.main(sys.argv[1:])
"""


class Fault(NamedTuple):
    """What is done to which process of how many, and what is then said."""

    number: signal.Signals
    process: int
    processes: int
    said: str
    mesh: str = "data=2,tensor=2"


FAULTS = {
    "a worker is killed": Fault(signal.SIGKILL, 1, 2, "process 1 was killed by SIGKILL"),
    "the coordinator is killed": Fault(signal.SIGKILL, 0, 2, "process 0 was killed by SIGKILL"),
    "one of four is killed": Fault(signal.SIGKILL, 2, 4, "process 2 was killed by SIGKILL"),
    "one of three is killed": Fault(signal.SIGKILL, 2, 3, "process 2 was killed by SIGKILL", "data=3,tensor=2"),
    "a worker stalls": Fault(signal.SIGSTOP, 1, 2, "restart 1 of 3"),
    "the coordinator stalls": Fault(signal.SIGSTOP, 0, 2, "restart 1 of 3"),
}


@pytest.mark.slow  # of the quick ones the notebook on hosts has a kill, too
@pytest.mark.parametrize("name", FAULTS)
def test_it_goes_on_after(name: str, tmp_path: Path, undisturbed: list[float]):
    fault, out = FAULTS[name], tmp_path / "run"
    args = ["launch", "--processes", str(fault.processes), "--", *run_args(out, "--mesh", fault.mesh)]
    with Launched(args=args, folder=tmp_path) as run:
        run.until_step(AT, out)
        os.kill(run.worker(fault.process), fault.number)
        assert run.end() == 0
    assert fault.said in run.text
    # Of the steps behind the newest checkpoint nothing but time is lost.
    resumed = int(run.text.split("resumed after step ")[1].split()[0])
    assert AT - AT % EVERY - EVERY <= resumed
    check_whole(out, undisturbed)


@pytest.mark.slow
def test_a_process_that_is_stuck_in_python(tmp_path: Path, undisturbed: list[float]):
    out, script = tmp_path / "run", tmp_path / "stuck.py"
    script.write_text(STUCK.format(at=AT))
    with Launched(args=["launch", "--step-timeout", "5", "--", str(script), *run_args(out)], folder=tmp_path) as run:
        assert run.end() == 0
    assert f"no step for 5 s since step {AT - 1}" in run.text and "in train_batch" in run.text
    check_whole(out, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_sigterm_on_one_host_has_all_save_and_stop(process: int, tmp_path: Path, undisturbed: list[float]):
    out = tmp_path / "run"
    with Launched(args=["launch", "--", *run_args(out)], folder=tmp_path) as run:
        run.until_step(AT, out)
        os.kill(run.worker(process), signal.SIGTERM)
        assert run.end() == 0
    stopped = checkpoint.steps(out / "checkpoints")[-1]
    assert stopped >= AT and f"stopped after step {stopped}; --resume goes on from there" in run.text
    with Launched(args=["launch", "--", *run_args(out, "--resume")], folder=tmp_path) as run:
        assert run.end() == 0
    check_whole(out, undisturbed)


@pytest.mark.slow
def test_a_host_gone_for_good(tmp_path: Path, undisturbed: list[float]):
    out = tmp_path / "run"
    ssh, gone = shell_of_two_hosts(tmp_path)
    hosts = ["--hosts", "a,b", "--ssh", str(ssh), "--coordinator", f"127.0.0.1:{free_port()}"]
    options = [*hosts, "--devices-per-process", "2", "--elastic"]
    with Launched(args=["launch", *options, "--", *run_args(out)], folder=tmp_path) as run:
        run.until_step(AT, out)
        gone.touch()
        for pid in run.pids(HOST_OF_TEST="b"):
            os.kill(pid, signal.SIGKILL)
        assert run.end() == 0, run.text
    assert "going on without b" in run.text and "data=1,tensor=2" in run.text
    check_whole(out, undisturbed)


DIFFERENT = {
    "another program": (
        "from sharding.launch import training; whole = training.optimizer\n"
        "training.optimizer = lambda o, s: __import__('optax').chain(whole(o, s), __import__('optax').scale(2.0))",
        "process 1 differs from process 0 in program",
    ),
    "another version of JAX": (
        "import sharding; module = sys.modules['sharding.initialize']; whole = module.version\n"
        "module.version = lambda name: '0.9.9' if name == 'jax' else whole(name)",
        "process 1 differs from process 0 in jax: 0.9.9, not",
    ),
    "another order of the data": (
        "from sharding.launch import corpus; whole = corpus.train_batch\n"
        "corpus.train_batch = lambda *a, step, **r: whole(*a, step=step + 1, **r)",
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
def test_a_host_that_would_do_otherwise_is_named(name: str, tmp_path: Path):
    change, said = DIFFERENT[name]
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
        assert run.end() == 2
    assert said in run.text and "Traceback" not in run.text and "[launch] restart" not in run.text
    assert last_step(tmp_path / "run") == 0
