"""The supervisor with processes that print, report steps, fail and hang, without JAX."""

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.process_groups import Launched, fake_ssh

from sharding import launch
from sharding.launch.commands.launch import process_command

REPORT = """
import os, signal, sys, time
me, restart = int(os.environ["SHARDING_PROCESS"]), int(os.environ["SHARDING_RESTART"])

def report(text):
    os.write(int(os.environ["SHARDING_PULSE"]), f"{text}\\n".encode())

report("up")
report(1)
"""


def launched(tmp_path: Path, script: str, *args: str) -> Launched:
    path = tmp_path / "script.py"
    path.write_text(REPORT + textwrap.dedent(script))
    return Launched(args=["launch", *args, "--", str(path)], folder=tmp_path)


@pytest.mark.slow
def test_lines_have_their_process_as_prefix(tmp_path: Path):
    script = """
        print("hello from", me, "of", os.environ["SHARDING_NUM_PROCESSES"])
        print("[Gloo] Rank 0 is connected to 2 peer ranks")
        print("[Gloo] Rank 0[Gloo] Rank  is connected to 21 is connected to  peer ranks.")
        print("trouble in", me, file=sys.stderr)
    """
    with launched(tmp_path, script, "--processes", "3", "--logs", str(tmp_path / "logs")) as run:
        assert run.wait_for_exit() == 0
    lines = run.text.splitlines()
    assert "[0] hello from 0 of 3" in lines and "[1] trouble in 1" in lines
    assert not any("hello from 1" in line or "Gloo" in line for line in lines)
    assert "hello from 2 of 3" in (tmp_path / "logs" / "process-2.log").read_text()


@pytest.mark.slow
def test_all_lines(tmp_path: Path):
    with launched(tmp_path, "print('hello from', me)", "--all-lines") as run:
        assert run.wait_for_exit() == 0
    assert {"[0] hello from 0", "[1] hello from 1"} <= set(run.text.splitlines())


def test_a_killed_process_restarts_all(tmp_path: Path):
    script = """
        print("start", restart)
        while restart == 0:
            time.sleep(0.1)
    """
    with launched(tmp_path, script) as run:
        run.wait_for_output("[0] start 0")
        os.kill(run.worker(1), signal.SIGKILL)
        assert run.wait_for_exit() == 0
    assert "process 1 was killed by SIGKILL" in run.text and "[0] start 1" in run.text


def test_the_error_that_came_first_is_shown_last(tmp_path: Path):
    script = """
        if me == 1:
            print("warming up", file=sys.stderr)
            raise RuntimeError("the disk of process 1 is gone")
        time.sleep(0.3)
        raise RuntimeError("Gloo all-reduce failed: Connection reset by peer")
    """
    with launched(tmp_path, script, "--restarts", "1") as run:
        assert run.wait_for_exit() == 1
    lines = run.text.splitlines()
    assert lines[-1] == "[launch]   RuntimeError: the disk of process 1 is gone"
    assert lines.count("[launch] restart 1 of 1, from the newest checkpoint") == 1
    assert "[launch] giving up after 1 restart" in lines


def test_errors_that_follow_a_kill_are_retried(tmp_path: Path):
    script = """
        if restart == 0 and me == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        if restart == 0:
            print("error: the other one is gone", file=sys.stderr)
            sys.exit(2)
    """
    with launched(tmp_path, script) as run:
        assert run.wait_for_exit() == 0
    assert "process 1 was killed by SIGKILL" in run.text and "restart 1 of 3" in run.text


def test_a_user_error_is_not_retried(tmp_path: Path):
    with launched(tmp_path, "print('error: no such mesh', file=sys.stderr); sys.exit(2)") as run:
        assert run.wait_for_exit() == 2
    assert "restart" not in run.text and run.text.splitlines()[-1] == "[launch]   error: no such mesh"


@pytest.mark.slow
def test_a_failure_before_all_have_connected_is_not_retried(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import nothing_of_this_name")
    with Launched(args=["launch", "--", str(script)], folder=tmp_path) as run:
        assert run.wait_for_exit() == 1
    assert "restart" not in run.text and "No module named 'nothing_of_this_name'" in run.text.splitlines()[-1]


def test_hung_processes_are_restarted(tmp_path: Path):
    script = """
        import faulthandler
        faulthandler.register(signal.SIGUSR1)

        def stuck_here():
            time.sleep(1000)

        report(7 + me)
        if restart == 0:
            stuck_here()
    """
    with launched(tmp_path, script, "--step-timeout", "2") as run:
        assert run.wait_for_exit() == 0
    assert "process 0: no step for 2 s since step 7" in run.text
    assert "[1]   File" in run.text and "in stuck_here" in run.text


def test_compiling_may_take_longer_than_a_step(tmp_path: Path):
    script = """
        if me == 1:
            report("compiling")
            time.sleep(4)  # longer than the step timeout, for the process that waits for it too
            report("working")
        else:
            time.sleep(5)
        report("finished")
    """
    with launched(tmp_path, script, "--step-timeout", "3", "--start-timeout", "20") as run:
        assert run.wait_for_exit() == 0, run.text
    assert "restart" not in run.text


@pytest.mark.slow
def test_compiling_may_hang_too(tmp_path: Path):
    script = """
        if restart == 0:
            report("compiling")
            time.sleep(1000)
    """
    with launched(tmp_path, script, "--step-timeout", "2") as run:
        assert run.wait_for_exit() == 0, run.text
    assert "restart 1 of 3" in run.text


def test_sigterm_reaches_all_processes(tmp_path: Path):
    script = """
        def stop(number, frame):
            print("saved", me, file=sys.stderr)
            sys.exit(0)

        signal.signal(signal.SIGTERM, stop)
        print("ready")
        while True:
            time.sleep(0.1)
    """
    with launched(tmp_path, script) as run:
        run.wait_for_output("[0] ready")
        time.sleep(0.5)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_for_exit() == 0
    assert {"[0] saved 0", "[1] saved 1"} <= set(run.text.splitlines())


@pytest.mark.slow
def test_processes_that_do_not_stop_are_killed(tmp_path: Path):
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        time.sleep(1000)
    """
    with launched(tmp_path, script, "--grace", "1") as run:
        run.wait_for_output("[0] ready")
        run.process.send_signal(signal.SIGINT)
        assert run.wait_for_exit() == 1
    assert "did not stop within 1 s" in run.text


@pytest.mark.parametrize("who", ["launcher", pytest.param("agent", marks=pytest.mark.slow)])
def test_nothing_is_left_behind(who: str, tmp_path: Path):
    script = """
        import pathlib, subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        pathlib.Path(sys.argv[0]).with_name(f"{me}.part").write_text(f"{os.getpid()} {child.pid}")
        pathlib.Path(sys.argv[0]).with_name(f"{me}.part").rename(pathlib.Path(sys.argv[0]).with_name(f"{me}.pids"))
        time.sleep(1000)
    """
    with launched(tmp_path, script, "--restarts", "0") as run:
        paths = [tmp_path / f"{number}.pids" for number in (0, 1)]
        run.wait_until(lambda: all(path.exists() for path in paths), "two processes")
        workers, children = zip(*(map(int, path.read_text().split()) for path in paths), strict=True)
        assert len({*workers, *children} & set(run.pids())) == 4
        ended = {*workers, *children} if who == "launcher" else {*workers}  # an agent killed ends no children of theirs
        if who == "launcher":
            run.process.kill()
            run.process.wait()
        else:
            (agent,) = run.pids(command="hosts.agent")
            os.kill(agent, signal.SIGKILL)
            assert run.process.wait(30) == 1
            assert "lost this machine" in run.text
        run.wait_until(lambda: ended.isdisjoint(run.pids()), "the processes to end")


@pytest.mark.slow
def test_a_program_that_is_not_there(tmp_path: Path):
    with Launched(args=["launch", "--", "no-such-program"], folder=tmp_path) as run:
        assert run.wait_for_exit() == 127
    assert run.text.splitlines()[-1] == "[launch]   no-such-program: No such file or directory"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--processes", "2"], "a command after --"),
        (["--hosts", "a,b", "--slurm", "--", "train"], "at most one of --hosts, --slurm"),
        (["--hosts", "a,,b", "--", "train"], "host names separated by commas"),
        (["--hosts", "a,a", "--", "train"], "distinct hosts"),
        (["--hosts", "a,b", "--processes", "3", "--", "train"], "fix:      --processes 2"),
        (["--per", "gpu", "--", "train"], "--gpus-per-host 8"),
        (["--coordinator", "nowhere", "--", "train"], "required: host:port"),
        (["--coordinator", "1234", "--", "train"], "required: host:port"),
        (["--coordinator", "a:65536", "--", "train"], "required: host:port"),
        (["--processes", "0", "--", "train"], "required: at least 1"),
        (["--hosts", "a,b", "--ssh", "no-such-ssh", "--", "train"], "no 'no-such-ssh' on this machine's PATH"),
        (["--slurm", "--", "train"], "--dry-run, to print the script"),
        (["--kubernetes", "--", "train"], "--nodes 2"),
        (["--", "nothing.py"], "no such file"),
    ],
)
def test_invalid_launches(given: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="2"):
        launch.main(["launch", *given])
    assert message in capsys.readouterr().err


def test_an_unreachable_host(tmp_path: Path):
    refuses = tmp_path / "ssh"
    refuses.write_text("#!/bin/sh\necho connect to host $1: Connection refused >&2\nexit 255\n")
    refuses.chmod(0o755)
    with Launched(args=["launch", "--hosts", "a,b", "--ssh", str(refuses), "--", "train"], folder=tmp_path) as run:
        assert run.wait_for_exit() == 2
    assert "connect to host a: Connection refused" in run.text and "restart" not in run.text


@pytest.mark.slow
def test_elastic_continues_without_a_lost_host(tmp_path: Path):
    ssh, gone = fake_ssh(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        REPORT + "print('start', restart, 'of', os.environ['SHARDING_NUM_PROCESSES'])\n"
        "while os.environ['SHARDING_NUM_PROCESSES'] == '2':\n    time.sleep(0.1)\n"
    )
    args = ["launch", "--hosts", "a,b", "--ssh", str(ssh), "--elastic", "--", str(script)]
    with Launched(args=args, folder=tmp_path) as run:
        run.wait_for_output("[0] start 0 of 2")
        gone.touch()
        run.kill(run.pids(HOST_OF_TEST="b"))
        assert run.wait_for_exit() == 0
    assert "continuing without b" in run.text and "[0] start 2 of 1" in run.text


def test_a_dry_run_prints_what_would_run(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        launch.main(["launch", "--hosts", "me@a,b", "--ssh", "sh", "--dry-run", "--", "train", "--steps", "3"])
    message = capsys.readouterr().out
    assert "me@a: processes 0" in message and "sharding.launch.hosts.agent" in message and "train --steps 3" in message


def test_a_batch_script(capsys: pytest.CaptureFixture[str], monkeypatch):
    argv = "launch --slurm --nodes 2 --time 01:00:00 --gpus-per-host 8 --dry-run -- train"
    monkeypatch.setattr(sys, "argv", ["sharding", *argv.split()])
    with pytest.raises(SystemExit, match="0"):
        launch.main()
    lines = capsys.readouterr().out.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --time=01:00:00", "#SBATCH --gres=gpu:8"} <= set(lines)
    assert "--slurm --nodes 2" in lines[-1] and "--time" not in lines[-1] and lines[-1].endswith("-- train")


def test_process_command():
    assert process_command(("train", "--steps", "3")) == [
        sys.executable,
        "-m",
        "sharding.launch",
        "train",
        "--steps",
        "3",
    ]
    assert process_command(("python", "x.py")) == [sys.executable, "x.py"]
    assert process_command(("hostname",)) == ["hostname"]
