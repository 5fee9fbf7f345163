"""Connecting processes: errors for inconsistent arguments, ports in use, and missing processes."""

import errno
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from jax.experimental import multihost_utils
from support import process_threads

import sharding
from sharding import ShardingError
from sharding.distributed import consistency, initialize, processes
from sharding.distributed import heartbeat as reports

CONNECT = """
import sys
import threading
import sharding
sharding.initialize(sys.argv[1], 3, 0, timeout=3)
"""


def test_single_process_has_nothing_to_do():
    sharding.initialize()
    sharding.initialize("127.0.0.1:1", 1, 0)
    assert (processes.index(), processes.count()) == (0, 1)
    assert processes.all_gather_text("anything", "text") == ["text"]
    processes.barrier("test")
    assert not processes.preempted(3)


def test_arguments_are_not_completed_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    environment = {processes.COORDINATOR: "127.0.0.1:1234", processes.NUM_PROCESSES: "2", processes.PROCESS: "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for given in (("127.0.0.1:1235",), (None, 2), (None, None, 1)):
        with pytest.raises(ShardingError, match="only some of coordinator, num_processes and process"):
            sharding.initialize(*given)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("127.0.0.1:1234", 2, None), "only some of coordinator, num_processes and process"),
        (("127.0.0.1", 2, 0), "is not host:port"),
        (("127.0.0.1:99999", 2, 0), "is not host:port"),
        (("127.0.0.1:1234", 2, 2), "process 2 of 2"),
        (("127.0.0.1:1234", 0, 0), "process 0 of 0"),
    ],
)
def test_inconsistent_arguments(given: tuple, found: str):
    with pytest.raises(ShardingError, match="0 <= process < num_processes") as caught:
        sharding.initialize(*given)
    assert any(found in line for line in caught.value.found)


def test_a_port_in_use():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ShardingError, match="required: a free port") as caught:
            sharding.initialize(f"127.0.0.1:{port}", 2, 0)
    (found,) = caught.value.found
    assert found.endswith(f"127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE)}")


def test_an_address_of_another_host():
    with pytest.raises(ShardingError, match="required: an address of process 0's host"):
        sharding.initialize("192.0.2.1:1234", 2, 0)


def test_missing_coordinator():
    begun = time.monotonic()
    with pytest.raises(ShardingError, match="can't reach the coordinator at 127.0.0.1:1: Connection refused"):
        sharding.initialize("127.0.0.1:1", 2, 1, timeout=1)
    assert 1 <= time.monotonic() - begun < 30


@pytest.mark.parametrize(("host", "is_name"), [("127.0.0.1", False), ("localhost", True)])
def test_missing_processes(host: str, is_name: bool):
    port = processes.free_port("127.0.0.1")
    ran = subprocess.run(
        [sys.executable, "-c", CONNECT, f"{host}:{port}", "3", "0", "3"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == processes.CONNECT_ERROR
    assert "not all of 3 processes connected within 3 s" in ran.stderr, ran.stderr
    assert ("which other hosts cannot reach" in ran.stderr) == is_name


def test_every_process_gets_the_texts_of_all_by_index(monkeypatch: pytest.MonkeyPatch):
    def texts(index):
        time.sleep(0.05 * (3 - index))  # a text is waited for
        return processes.all_gather_text("one", f"text {index}"), processes.all_gather_text("two", f"{index}\0")

    expected = ["text 0", "text 1", "text 2"], ["0\0", "1\0", "2\0"]
    assert process_threads.run(monkeypatch, texts, 3) == [expected] * 3


def test_a_process_at_another_topic_is_named(monkeypatch: pytest.MonkeyPatch):
    topics = ("saving", "saving", "restoring")
    found = process_threads.run(monkeypatch, lambda index: processes.barrier(topics[index]), 3)
    others = [["process 2 at 'restoring'"]] * 2 + [["process 0 at 'saving'", "process 1 at 'saving'"]]
    assert [list(error.found) for error in found] == others
    assert [f"process {i} at {topics[i]!r}" in str(error) for i, error in enumerate(found)] == [True] * 3


def test_a_process_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "_TIMEOUT_SECONDS", 0.2)
    found = process_threads.run(monkeypatch, lambda index: index != 1 and processes.barrier("saving"), 3)
    assert found[1] is False
    for index in (0, 2):
        assert isinstance(found[index], processes.ConnectError)
        (line,) = found[index].found
        assert line.startswith("process 1 did not reach this barrier: DEADLINE_EXCEEDED") and "\n" not in line


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_coordinator_waits_for_all_others_which_go_on(count, monkeypatch: pytest.MonkeyPatch):
    times = {}

    def wait(index):
        time.sleep(0.1 * index)
        processes.coordinator_waits("end")
        times[index] = time.monotonic()

    assert process_threads.run(monkeypatch, wait, count) == [None] * count
    assert sorted(times, key=lambda index: times[index]) == [*range(1, count), 0]
    monkeypatch.setattr(processes, "_TIMEOUT_SECONDS", 0.2)
    (error, *none) = process_threads.run(monkeypatch, lambda i: i != 1 and processes.coordinator_waits("end"), count)
    assert ("process 1 did not reach" in str(error)) == (count > 1) and none == [False, None][: count - 1]


@pytest.mark.parametrize("count", [1, 2])
def test_only_one_of_several_processes_exits_at_once(count, monkeypatch: pytest.MonkeyPatch):
    codes = []
    monkeypatch.setattr(processes.os, "_exit", codes.append)
    process_threads.run(monkeypatch, lambda index: processes.exit_if_multiprocess(7), count)
    assert codes == [7] * (count if count > 1 else 0)


@pytest.mark.parametrize("is_alone", [True, False])
def test_the_cluster_that_jax_detects(is_alone, monkeypatch: pytest.MonkeyPatch):
    detected = (None,) * 4 if is_alone else ("127.0.0.1", 2, 0, [0])
    monkeypatch.setattr(processes.compat, "detected_cluster", lambda: detected)
    if is_alone:
        return sharding.initialize()
    with pytest.raises(ShardingError, match="is not host:port"):
        sharding.initialize()


def test_an_error_that_ends_a_process_is_printed_before(monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.setattr(initialize.os, "_exit", lambda code: os.write(2, f"exit {code}".encode()))
    initialize._exit_with(processes.ConnectError("asked", found="nobody", required="somebody"))
    printed = capfd.readouterr().err
    assert printed.startswith("error: asked") and printed.endswith(f"exit {processes.CONNECT_ERROR}")


@pytest.mark.parametrize("count", [1, 2])
def test_several_processes_stop_at_the_step_on_which_jax_has_them_agree(count, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: step == 3)
    found = process_threads.run(monkeypatch, lambda index: [processes.preempted(step) for step in (2, 3)], count)
    assert found == [[False, count > 1]] * count


@pytest.mark.parametrize(("kind", "code"), [(processes.ConnectError, processes.CONNECT_ERROR), (ValueError, 1)])
def test_an_uncaught_error_ends_its_process_with_a_code_that_tells_whether_to_connect_again(
    kind, code, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    initialize._exit_immediately_on_error()
    codes = []
    monkeypatch.setattr(processes.os, "_exit", codes.append)
    error = kind("asked", found="nobody", required="somebody") if kind is processes.ConnectError else kind("asked")
    process_threads.run(monkeypatch, lambda index: sys.excepthook(kind, error, None), 2)
    assert codes == [code] * 2 and "asked" in capsys.readouterr().err


LAUNCHED = {processes.COORDINATOR: "10.0.0.1:1234", processes.NUM_PROCESSES: "3", processes.PROCESS: "2"}


def identity(monkeypatch: pytest.MonkeyPatch, given=(None, None, None), environment=(), detected=(None,) * 4):
    """Coordinator, processes, own index and local devices of a process; None if it is the only one."""
    monkeypatch.setattr(processes.compat, "detected_cluster", lambda: detected)
    for name, value in dict(environment).items():
        monkeypatch.setenv(name, value)
    found = initialize._identity(given, "asked")
    return found and (found.address, found.num_processes, found.process, found.local_devices)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 17])
@pytest.mark.parametrize("local", [None, 0, 3])
def test_arguments_a_launcher_and_a_cluster_name_the_same_processes(num_processes, local, monkeypatch):
    """All that differs is that arguments name no local devices; one process is none of several, however it is told."""
    for process in {0, num_processes // 2, num_processes - 1}:
        whole = ("10.0.0.1:1234", num_processes, process)
        environment = dict(zip(LAUNCHED, map(str, whole), strict=True))
        expected = (("10.0.0.1", 1234), num_processes, process) if num_processes > 1 else None
        devices = None if local is None else (local,)
        with monkeypatch.context() as m:
            cluster = (*whole, None if local is None else [local])
            assert identity(m, detected=cluster) == (expected and (*expected, devices))
            assert identity(m, whole, detected=("10.0.0.2:1", 9, 8, [7])) == (expected and (*expected, None))
        with monkeypatch.context() as m:
            launched = environment | ({processes.LOCAL_DEVICE: str(local)} if local is not None else {})
            assert identity(m, environment=launched) == (expected and (*expected, devices))
            other = (("10.0.0.2:5678", 5, 4), (("10.0.0.2", 5678), 5, 4, None))
            assert identity(m, other[0]) == other[1]  # arguments come first


@pytest.mark.parametrize(("process", "num_processes"), [(0, 0), (-1, 2), (2, 2), (3, 2), (0, -1)])
def test_an_index_that_no_process_has(process, num_processes, monkeypatch):
    environment = LAUNCHED | {processes.NUM_PROCESSES: str(num_processes), processes.PROCESS: str(process)}
    with pytest.raises(ShardingError, match=f"process {process} of {num_processes}"):
        identity(monkeypatch, environment=environment)


@pytest.mark.parametrize("port", ["0", "1", "65535", "65536", "", "-1", "1.5", "\u00b2"])
def test_ports(port, monkeypatch):
    given = (f"[::1]:{port}", 2, 1)
    if port in ("1", "65535"):
        assert identity(monkeypatch, given) == (("::1", int(port)), 2, 1, None)
    else:
        with pytest.raises(ShardingError, match="is not host:port"):
            identity(monkeypatch, given)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch):
    """The options that each process passes to JAX, which only listens where it is told to; by process."""
    found, listeners = {}, []

    def connect(coordinator, num_processes, process, **options):
        found[process] = {"coordinator": coordinator, "num_processes": num_processes, **options}
        if process == 0:
            host, port = options["coordinator_bind_address"].split(":")
            listeners.append(socket.create_server((host, int(port))))

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(
        processes.compat, "set_gloo_address", lambda address: found.setdefault("own", []).append(address)
    )
    monkeypatch.setattr(initialize.jax.distributed, "initialize", connect)
    monkeypatch.setattr(initialize, "_exit_with", lambda error: found.setdefault("missing", []).append(error))
    yield found
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(("launcher", "argument", "seconds"), [(None, None, 30), ("7", None, 7), ("7", 4.6, 5)])
def test_processes_connect_agree_and_report(launcher, argument, seconds, connections, monkeypatch):
    """JAX ends a process that waits for another one too long, so it waits longer than this library does."""
    coordinator = f"127.0.0.1:{processes.free_port('127.0.0.1')}"
    if launcher is not None:
        monkeypatch.setenv(processes.CONNECT_TIMEOUT, launcher)
    reader, writer = os.pipe()
    monkeypatch.setenv(reports.HEARTBEAT_FD, str(writer))

    def begin(index):
        sharding.initialize(coordinator, 3, index, timeout=argument, heartbeat=20 + index)
        return "connected"

    assert process_threads.run(monkeypatch, begin, 3) == ["connected"] * 3
    assert sorted(os.read(reader, 100).decode().split()) == [reports.UP] * 3
    assert connections.pop("own") == ["127.0.0.1"] * 3 and sorted(connections) == [0, 1, 2]
    for index, options in connections.items():
        assert (options["coordinator"], options["num_processes"]) == (coordinator, 3)
        assert options["coordinator_bind_address"] == coordinator
        assert options["initialization_timeout"] == seconds + 30
        assert options["heartbeat_timeout_seconds"] == options["shutdown_timeout_seconds"] == 20 + index
    for end in (reader, writer):
        os.close(end)


def test_a_process_with_other_versions_is_named_when_it_connects(connections, monkeypatch):
    coordinator, here = f"127.0.0.1:{processes.free_port('127.0.0.1')}", threading.local()
    monkeypatch.setattr(consistency, "versions", lambda: {"jax": here.version})

    def begin(index):
        here.version = "0.12" if index else "0.10"
        sharding.initialize(coordinator, 3, index)

    for error in process_threads.run(monkeypatch, begin, 3):
        assert isinstance(error, ShardingError)
        assert list(error.found) == ["process 0 differs from process 1 in jax: 0.10, not 0.12"]


def test_why_jax_cannot_connect_is_said_in_one_line(connections, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no route\nat a line of C++")

    monkeypatch.setattr(initialize.jax.distributed, "initialize", refuse)
    with pytest.raises(processes.ConnectError, match="all processes connected in time") as caught:
        sharding.initialize(f"127.0.0.1:{processes.free_port('127.0.0.1')}", 2, 0, timeout=0.2)
    assert list(caught.value.found) == ["no route"]
    time.sleep(0.3)
    assert "missing" not in connections  # one error is enough


@pytest.mark.parametrize("given", [("10.0.0.1", 2, 1), ("10.0.0.1:1", None, None), (None, None, 0), (None, None, None)])
@pytest.mark.parametrize("is_detected", [False, True])
def test_the_error_names_what_was_asked(given, is_detected, monkeypatch):
    """The arguments if there are any, not what was detected."""
    if is_detected:
        monkeypatch.setattr(processes.compat, "detected_cluster", lambda: ("10.0.0.1", 2, 1, None))
    else:
        for name, value in (LAUNCHED | {processes.COORDINATOR: "10.0.0.1"}).items():
            monkeypatch.setenv(name, value)
    with pytest.raises(ShardingError, match="a coordinator host:port") as caught:
        sharding.initialize(*given)
    shown = ", ".join(map(repr, given)) if any(one is not None for one in given) else ""
    assert caught.value.asked == f"sharding.initialize({shown})"


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("host", ["node7", "127.0.1.1"])
@pytest.mark.parametrize("own", ["127.0.1.1", "10.0.0.7"])
def test_a_name_that_only_its_own_host_resolves_to_a_loopback_is_told(process, host, own):
    """Others cannot reach process 0 there. Who passed the loopback address itself has all processes on one host."""
    identity = initialize._Identity(coordinator=f"{host}:1234", num_processes=3, process=process)
    error = initialize._missing_error(identity, own, "asked", 7.0)
    is_told = any("other hosts cannot reach" in line for line in error.found)
    assert is_told == (process == 0 and host == "node7" and own == "127.0.1.1")
    assert error.found[0] == "not all of 3 processes connected within 7 s"


def test_a_coordinator_that_does_not_answer_is_not_waited_for_beyond_the_time(monkeypatch):
    def unanswered(address, timeout):
        time.sleep(min(timeout, 5))
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(initialize.socket, "create_connection", unanswered)
    begun = time.monotonic()
    with pytest.raises(processes.ConnectError, match=os.strerror(errno.ETIMEDOUT)):
        sharding.initialize("10.0.0.1:1234", 2, 1, timeout=0.4)
    assert 0.3 < time.monotonic() - begun < 2


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_launched_process_shows_its_stack_when_it_is_asked(is_launched, connections, monkeypatch):
    faulthandler.unregister(signal.SIGUSR1)
    reader, writer = os.pipe()
    if is_launched:
        monkeypatch.setenv(reports.HEARTBEAT_FD, str(writer))
    coordinator = f"127.0.0.1:{processes.free_port('127.0.0.1')}"
    assert process_threads.run(monkeypatch, lambda index: sharding.initialize(coordinator, 2, index), 2) == [None] * 2
    assert faulthandler.unregister(signal.SIGUSR1) == is_launched
    for end in (reader, writer):
        os.close(end)
