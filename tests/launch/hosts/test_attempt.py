"""One attempt's decisions, from the agents' messages alone: what is started, what counts as hung or failed."""

import io
import itertools
import queue
import signal
import time

import pytest

from sharding.distributed import processes
from sharding.launch.config.launch_config import Launch
from sharding.launch.exit_codes import USER_ERROR
from sharding.launch.hosts import supervisor
from sharding.launch.hosts.agent_channel import Channel, Event, Host
from sharding.launch.hosts.agent_messages import ALIVE_TIMEOUT
from sharding.launch.hosts.process_output import ProcessOutput
from sharding.launch.hosts.supervisor import Supervisor, _Attempt, _renumbered


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SETTLE", 0.0)
    monkeypatch.setattr(supervisor, "STACKS", 0.0)
    monkeypatch.delenv("SHARDING_POD", raising=False)


def host(name: str, *numbers: int, command: tuple[str, ...] = ("true",), in_args: bool = False) -> Host:
    return Host(name=name, address=f"{name}.net", command=command, processes=numbers, command_in_args=in_args)


TWO = (host("a", 0, 1), host("b", 2))


def attempt(*hosts: Host, restarts: int = 0, first_step: float | None = None, **options: object) -> _Attempt:
    config = Launch(command=("train",), **options)
    output = ProcessOutput(out=io.StringIO())
    run = Supervisor(config=config, hosts=hosts or TWO, command=("train",), output=output)
    run._first_step = first_step
    return _Attempt(run, hosts or TWO, restarts)


def tell(run: _Attempt, kind: str, process: int, **content: object) -> None:
    (at,) = [each for each in run.hosts if process in each.processes]
    run._handle(Event(host=at, message={"is": kind, "process": process, **content}))


def ago(run: _Attempt, process: int, seconds: float) -> None:
    """Makes the last report of a process older."""
    run.status[process].last_report -= seconds


def test_the_environment_of_each_process(monkeypatch: pytest.MonkeyPatch):
    for name in ("JAX_X", "XLA_X", "LIBTPU_X", "NCCL_X", "MY_JAX_X"):
        monkeypatch.setenv(name, name.lower())
    run = attempt(restarts=2, devices_per_process=4, connect_timeout=7, elastic=True)
    common = run._environment()
    forwarded = {name for name in common if not name.startswith("SHARDING_")}
    assert {"JAX_X", "XLA_X", "LIBTPU_X", "NCCL_X"} <= forwarded and "MY_JAX_X" not in forwarded
    assert common[processes.RESTART] == "2" and float(common[processes.CONNECT_TIMEOUT]) == 7
    assert common[processes.CPU_DEVICES] == "4" and common[processes.ELASTIC] == "1"
    assert not {processes.CPU_DEVICES, processes.ELASTIC} & attempt()._environment().keys()
    expected = {processes.COORDINATOR: "c:1", processes.NUM_PROCESSES: "3", processes.PROCESS: "2"}
    assert run._identity(2, 0, "c:1") == expected
    with_gpus = attempt(per="gpu", gpus_per_host=2)
    assert with_gpus._identity(2, 1, "c:1") == expected | {processes.LOCAL_DEVICE: "1"}


def test_arguments_only_for_launchers_without_stdin():
    run = attempt(host("mpirun", 0, 1, in_args=True))
    pairs = [f"{name}={value}" for name, value in run._environment().items()]
    assert run._arguments(run.hosts[0]) == [*pairs, "--", "train"]
    assert run._arguments(host("a", 0)) == []


# Prints that it is ready, and then the message that it gets.
ECHO = """
import json, sys
print(f"\\x1e" + json.dumps({"is": "ready", "name": "x", "port": 77}), flush=True)
for line in sys.stdin:
    print("got " + line[1:], flush=True)
"""


@pytest.mark.parametrize(("coordinator", "expected"), [(None, "a.net:77"), ("here:5", "here:5")])
def test_agents_are_told_what_to_start(coordinator: str | None, expected: str):
    import json
    import sys

    command = (sys.executable, "-c", ECHO)
    hosts = (host("a", 0, 1, command=command), host("b", 2, 3, command=command))
    run = attempt(*hosts, coordinator=coordinator, per="gpu", gpus_per_host=2)
    run.channels = [Channel(each, run.events) for each in hosts]
    try:
        assert run._connect() is None
        started = []
        for channel in run.channels:
            deadline = time.monotonic() + 20
            while not any('"start"' in line for line in channel.stray) and time.monotonic() < deadline:
                time.sleep(0.01)
            line = next(line for line in channel.stray if '"start"' in line)
            message = json.loads(line.removeprefix("got "))
            assert message["command"] == ["train"]
            started += message["processes"]
    finally:
        for channel in run.channels:
            channel.close(0.1)
    assert [each["process"] for each in started] == [0, 1, 2, 3]
    environments = [each["environment"] for each in started]
    assert [each[processes.PROCESS] for each in environments] == list("0123")
    assert [each[processes.LOCAL_DEVICE] for each in environments] == list("0101")
    assert {each[processes.COORDINATOR] for each in environments} == {expected}
    assert {each[processes.NUM_PROCESSES] for each in environments} == {"4"}


def test_hosts_are_renumbered_from_zero():
    found = _renumbered([host("b", 2, 3), host("d", 6), host("e", 7, 8, 9)])
    assert [(each.name, each.processes) for each in found] == [("b", (0, 1)), ("d", (2,)), ("e", (3, 4, 5))]


def test_all_processes_must_be_up_to_count_as_connected():
    run = attempt()
    for process in (0, 2):
        tell(run, "up", process)
        assert not run.supervisor._connected
    tell(run, "up", 1)
    assert run.supervisor._connected
    again = _Attempt(run.supervisor, run.hosts, 1)
    tell(again, "up", 0)
    assert run.supervisor._connected


def test_the_first_step_is_timed_once():
    run = attempt()
    run.started = time.monotonic() - 100
    tell(run, "step", 1, step=5)
    first = run.supervisor._first_step
    assert first is not None and 100 <= first < 110
    run.started -= 100
    tell(run, "step", 1, step=6)
    assert run.supervisor._first_step == first and run.status[1].step == 6 and run.status[0].step is None


def test_steps_that_take_too_long():
    run = attempt(step_timeout=10)
    assert run._hang_failure() is None
    for process, step in ((0, 3), (1, 2), (2, 2)):
        tell(run, "step", process, step=step)
    assert run._hang_failure() is None
    ago(run, 0, 9)
    assert run._hang_failure() is None
    for process in (0, 1, 2):
        ago(run, process, 11)
    failure = run._hang_failure()
    assert failure is not None
    # Those behind the others.
    assert failure.what == "process 1, 2: no step for 10 s since step 2"
    assert failure.code == supervisor.FAILED and failure.retry
    tell(run, "exit", 1, code=0)
    failure = run._hang_failure()
    assert failure is not None and failure.what.startswith("process 2: ")


def test_a_finished_process_has_time_to_save():
    run = attempt(step_timeout=10, grace=50)
    for process in range(3):
        tell(run, "step", process, step=1)
    tell(run, "finished", 1)
    assert [run._timeout(run.status[process]) for process in range(3)] == [10, 60, 10]
    ago(run, 1, 59)
    assert run._hang_failure() is None
    ago(run, 1, 2)
    assert "no step for 60 s" in run._hang_failure().what


def test_others_wait_for_one_that_compiles():
    run = attempt(step_timeout=10, start_timeout=100, grace=5)
    for process in range(3):
        tell(run, "step", process, step=1)
        ago(run, process, 99)
    tell(run, "compiling", 1)
    assert {run._timeout(status) for status in run.status.values()} == {100}
    assert run._hang_failure() is None
    before = run.status[0].last_report
    tell(run, "working", 1)
    # The wait for it counts as no step of theirs.
    assert run.status[0].last_report > before + 90 and run._hang_failure() is None
    assert {run._timeout(status) for status in run.status.values()} == {10}
    ago(run, 0, 5)
    before = run.status[0].last_report
    tell(run, "working", 2)  # did not compile
    assert run.status[0].last_report == before


@pytest.mark.parametrize(
    ("option", "first", "expected"), [(None, None, None), (70, 2, 70), (70, None, 70), (None, 4, 22)]
)
def test_the_timeout_of_the_first_step(option: float | None, first: float | None, expected: float | None):
    """As given, or three times an earlier attempt's and a step's."""
    run = attempt(step_timeout=10, start_timeout=option, first_step=first)
    assert run._start_timeout() == expected
    for seconds in (0, 1e6 if expected is None else expected - 1):
        run.started = time.monotonic() - seconds
        assert run._hang_failure() is None
    if expected is not None:
        run.started = time.monotonic() - expected - 1
        failure = run._hang_failure()
        assert failure is not None and failure.what == f"processes: no step within {expected:.0f} s"
        tell(run, "step", 1, step=0)
        assert run._hang_failure() is None


def test_compiling_never_shortens_a_timeout():
    run = attempt(step_timeout=200, start_timeout=100)
    tell(run, "compiling", 0)
    assert run._timeout(run.status[0]) == 200


def test_hosts_without_a_heartbeat():
    run = attempt()
    channels = [Channel(each, run.events) for each in run.hosts]
    run.channels = channels
    try:
        assert run._hang_failure() is None
        channels[1].last_message -= ALIVE_TIMEOUT - 1
        assert run._hang_failure() is None
        channels[1].last_message -= 2
        failure = run._hang_failure()
        assert failure is not None and failure.lost == (TWO[1],) and failure.retry
        assert failure.what == "no heartbeat from b for 10 s"
    finally:
        for channel in channels:
            channel.close(0.1)


def test_the_grace_after_a_signal():
    run = attempt(grace=20)
    run.num_signals, run.stopping = 1, time.monotonic() - 19
    assert run._hang_failure() is None
    run.stopping -= 2
    failure = run._hang_failure()
    assert failure is not None and failure.what == "did not stop within 20 s" and not failure.retry


@pytest.mark.parametrize("code", [1, 3, USER_ERROR, processes.CONNECT_ERROR, -9, -6])
@pytest.mark.parametrize("first_step", [None, 0.0, 3.0])
@pytest.mark.parametrize("connected", [True, False])
def test_when_another_attempt_may_succeed(code: int, first_step: float | None, connected: bool):
    """After a kill always; after an error of its own only once it has worked; after no connection if there was one."""
    run = attempt(first_step=first_step)
    run.supervisor._connected = connected
    tell(run, "exit", 1, code=code)
    failure = run._exit_failure()
    retry = {USER_ERROR: False, processes.CONNECT_ERROR: connected, -9: True, -6: True}.get(
        code, first_step is not None
    )
    assert failure.retry == retry
    assert failure.code == (code if code > 0 else 1)
    assert failure.what.startswith("process 1 on a ")


def test_the_failure_that_came_first():
    for codes in itertools.permutations([0, 1, -signal.SIGKILL]):
        run = attempt()
        tell(run, "step", 0, step=7)
        for process, code in enumerate(codes):
            tell(run, "line", process, text=f"error: of {process}", is_error=True)
            tell(run, "exit", process, code=code)
        killed = codes.index(-signal.SIGKILL)
        failure = run._exit_failure()
        after = " after step 7" if killed == 0 else ""
        assert failure.what == f"process {killed} on {'aab'[killed]} was killed by SIGKILL{after}"
        assert failure.error == (f"error: of {killed}",) and failure.code == 1 and not failure.lost


def test_no_host_is_named_if_there_is_one():
    run = attempt(host("a", 0, 1))
    tell(run, "exit", 0, code=5)
    assert run._exit_failure().what == "process 0 exited with code 5"


def test_a_lost_agent():
    run = attempt()
    run._handle(Event(host=TWO[1], message=None))
    failure = run._exit_failure()
    assert (failure.what, failure.lost, failure.code, failure.retry) == ("lost b", (TWO[1],), 1, True)
    # An agent may go when its processes have ended, not before the last.
    run = attempt()
    tell(run, "exit", 0, code=0)
    run._handle(Event(host=TWO[0], message=None))
    assert run.closed == {"a"}
    run = attempt()
    for process in (0, 1):
        tell(run, "exit", process, code=0)
    run._handle(Event(host=TWO[0], message=None))
    assert not run.closed


def test_events_in_a_queue_are_handled_up_to_an_exit():
    run = attempt()
    run.events = queue.Queue()
    for message in ({"is": "step", "process": 0, "step": 1}, {"is": "exit", "process": 0, "code": 0}):
        run.events.put(Event(host=TWO[0], message=message))
    run.events.put(Event(host=TWO[0], message={"is": "step", "process": 1, "step": 1}))
    run._receive(5.0)
    assert run.status[0].code == 0 and run.status[1].step is None
    run.events.put(Event(host=TWO[0], message={"is": "line", "process": 0, "text": "bye", "is_error": True}))
    run._drain()
    assert run.events.empty() and run.output.error(0) == ["bye"] and run.status[1].step is None


def test_unreachable_hosts():
    run = attempt(connect_timeout=3)
    channels = [Channel(each, run.events) for each in run.hosts]
    run.channels, run.closed = channels, {"b"}
    try:
        for connected in (True, False):
            run.supervisor._connected = connected
            failure = run._unreachable(channels)
            assert failure.what == "a, b can't be reached" and failure.code == USER_ERROR
            assert failure.retry == connected and failure.lost == TWO
            text = "\n".join(failure.error)
            assert "a: no answer within 3 s" in text and "b: refused" in text and "true true" in text
    finally:
        for channel in channels:
            channel.close(0.1)
