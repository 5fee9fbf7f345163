"""Restarts, exit codes and lost hosts, with agents that only say what a test has them say."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from sharding.launch.config.launch_config import Launch
from sharding.launch.exit_codes import USER_ERROR
from sharding.launch.hosts import ray, supervisor
from sharding.launch.hosts.agent_channel import Host
from sharding.launch.hosts.agent_messages import decode
from sharding.launch.hosts.process_output import ProcessOutput
from sharding.launch.hosts.supervisor import Supervisor

# Says what its argument has for this attempt, an object per message, and leaves; without any it never answers.
AGENT = r"""
import json, sys
says = json.loads(sys.argv[1])

def send(message):
    print("\x1e" + json.dumps(message), flush=True)

if says == "refused":
    print("no such host", file=sys.stderr)
    sys.exit(255)
if says == "silent":
    sys.stdin.read()
    sys.exit(0)
send({"is": "ready", "name": "x", "port": 1})
for line in sys.stdin:
    message = json.loads(line[1:])
    if message["is"] == "start":
        attempt = int(message["processes"][0]["environment"]["SHARDING_RESTART"])
        numbers = [each["process"] for each in message["processes"]]
        for each in says[min(attempt, len(says) - 1)]:
            for number in numbers:
                send({"process": number, "text": f"{number} {attempt}", "is_error": True, **each})
        if says[min(attempt, len(says) - 1)] == []:
            sys.exit(0)
    elif message["is"] == "stop":
        for number in numbers:
            send({"is": "exit", "process": number, "code": 0})
    elif message["is"] == "kill":
        sys.exit(0)
"""

UP, STEP, LINE = {"is": "up"}, {"is": "step", "step": 3}, {"is": "line"}
GOOD = [UP, STEP, {"is": "exit", "code": 0}]


def exits(code: int) -> list[dict]:
    return [UP, STEP, LINE, {"is": "exit", "code": code}]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SETTLE", 0.2)
    monkeypatch.delenv("SHARDING_POD", raising=False)


def ran(*says: object, **options: object) -> tuple[int, list[str], Supervisor]:
    """The exit code and the launcher's lines of hosts a, b, ... with a process each."""
    hosts = [
        Host(name=name, address=name, command=(sys.executable, "-c", AGENT, json.dumps(each)), processes=(k,))
        for k, (name, each) in enumerate(zip("abc", says, strict=False))
    ]
    out = io.StringIO()
    config = Launch(command=("train",), **options)
    run = Supervisor(config=config, hosts=hosts, command=("train",), output=ProcessOutput(out=out))
    code = run.run()
    lines = [re.sub(r"\d+ s after", "0 s after", line) for line in out.getvalue().splitlines()]
    return code, [line.removeprefix("[launch] ") for line in lines], run


def test_success():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert ran([GOOD], [GOOD])[:2] == (0, [])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(("restarts", "failures"), [(0, 1), (1, 1), (2, 5)])
def test_as_many_restarts_as_allowed(restarts: int, failures: int):
    code, lines, _ = ran([exits(5)] * failures + [GOOD], restarts=restarts)
    expected = ["[0] 0 0", "process 0 exited with code 5 after step 3"]
    for attempt in range(1, min(failures, restarts) + 1):
        expected.append(f"restart {attempt} of {restarts}, from the newest checkpoint")
        expected += [f"[0] 0 {attempt}", "process 0 exited with code 5 after step 3, 0 s after the restart"]
    if failures > restarts:
        several = f"giving up after {restarts} restart{'s' if restarts > 1 else ''}"
        expected += [*([several] if restarts else []), "first error:", f"  0 {restarts}"]
    else:
        del expected[-2:]
    assert code == (5 if failures > restarts else 0)
    assert lines == expected


def test_what_is_not_retried():
    assert ran([exits(USER_ERROR), GOOD])[0] == USER_ERROR
    code, lines, _ = ran([[{"is": "exit", "code": 4}], GOOD])  # before its first step
    assert code == 4 and not any("restart" in line for line in lines)


def test_a_command_that_is_not_there():
    host = Host(name="a", address="a", command=("/no/such/program",), processes=(0,))
    out = io.StringIO()
    config = Launch(command=("train",), restarts=3)
    run = Supervisor(config=config, hosts=[host], command=("train",), output=ProcessOutput(out=out))
    assert run.run() == USER_ERROR
    assert "/no/such/program: not found; install it, or add it to PATH" in out.getvalue()
    assert "restart" not in out.getvalue()


@pytest.mark.parametrize("elastic", [True, False])
def test_a_host_that_stays_lost(elastic: bool):
    """Its first loss may be a hiccup; at the second the others go on without it."""
    code, lines, _ = ran([[UP, STEP], [UP, STEP], GOOD], [[]], restarts=2, elastic=elastic)
    assert lines[0] == "lost b" and lines[1] == "restart 1 of 2, from the newest checkpoint"
    assert lines[2].startswith("lost b, ")
    assert ("continuing without b" in lines) == elastic
    assert code == (0 if elastic else 1)
    assert lines[-1] == ("restart 2 of 2, from the newest checkpoint" if elastic else "giving up after 2 restarts")


def test_hosts_that_do_not_answer():
    code, lines, _ = ran([GOOD], "refused", connect_timeout=20)
    assert code == USER_ERROR and lines[0] == "b can't be reached"
    assert any("no such host" in line for line in lines)
    code, lines, _ = ran([GOOD], "silent", connect_timeout=1)
    assert code == USER_ERROR and any("b: no answer within 1 s" in line for line in lines)


@pytest.mark.parametrize("pod", [True, False])
def test_the_exit_code_after_a_signal(pod: bool, monkeypatch: pytest.MonkeyPatch):
    """A pod that a signal stops has not finished."""
    if pod:
        monkeypatch.setenv("SHARDING_POD", "1")
        monkeypatch.setenv("SHARDING_RESTART", "0")
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    code, lines, run = ran([[UP, STEP]])
    timer.join()
    assert code == (1 if pod else 0)
    if not pod:
        assert lines == ["stopping: all processes save at the same step; repeat to stop immediately"]
    assert run._signals == [signal.SIGTERM]


def messages(*command: str) -> list[dict]:
    """What an agent that mpirun started says of its program until that has ended."""
    agent = [sys.executable, "-m", "sharding.launch.hosts.agent", "NAME=value", "--", *command]
    done = subprocess.run(agent, env=os.environ | {"PMI_RANK": "3"}, capture_output=True, stdin=subprocess.DEVNULL)
    found = [decode(line) for line in done.stdout.splitlines()]
    return [message for message in found if message is not None and message["is"] not in ("alive", "ready")]


def test_an_agent_forwards_lines_reports_and_the_exit_code():
    program = """
import os, sys
print(os.environ["NAME"])
print("bad", file=sys.stderr)
for text in ("up", "compiling", "working", "7", "finished"):
    os.write(int(os.environ["SHARDING_PULSE"]), f"{text}\\n".encode())
sys.exit(9)
"""
    sent = messages(sys.executable, "-c", program)
    lines = sorted((each["text"], each["is_error"]) for each in sent if each["is"] == "line")
    assert lines == [("bad", True), ("value", False)]
    reports = [{k: v for k, v in each.items() if k != "process"} for each in sent if each["is"] not in ("line", "exit")]
    kinds = ["up", "compiling", "working", "step", "finished"]
    assert [each["is"] for each in reports] == kinds and reports[3] == {"is": "step", "step": 7}
    assert sent[-1] == {"is": "exit", "process": 3, "code": 9} and {each["process"] for each in sent} == {3}


def test_an_agent_whose_program_is_not_there():
    line, end = messages("no-such-program")
    text = "no-such-program: No such file or directory"
    assert line == {"is": "line", "process": 3, "text": text, "is_error": True}
    assert end == {"is": "exit", "process": 3, "code": 127}


def test_this_node_of_a_ray_cluster_is_first(monkeypatch: pytest.MonkeyPatch):
    nodes = [("c", True), ("b", False), ("a", True), ("d", True)]
    cluster = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "c"),
        nodes=lambda: [{"NodeID": n, "NodeManagerAddress": f"{n}.net", "Alive": alive} for n, alive in reversed(nodes)],
        shutdown=lambda: None,
    )
    monkeypatch.setattr(ray, "_connected", lambda: cluster)
    assert ray.nodes() == [("c", "c.net"), ("a", "a.net"), ("d", "d.net")]


def test_switches_are_off_by_default():
    config = Launch(command=("train",))
    switches = ("slurm", "mpi", "kubernetes", "ray", "elastic", "all_lines", "dry_run")
    assert not any(getattr(config, name) for name in switches)
    assert config.restarts == 3 and config.gpus_per_host == 0 and config.start_timeout is None
