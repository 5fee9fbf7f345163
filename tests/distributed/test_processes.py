"""Connecting processes: errors for inconsistent arguments, ports in use, and missing processes."""

import os
import socket
import subprocess
import sys
import time

import pytest
from jax.experimental import multihost_utils
from support import process_threads

import sharding
from sharding import ShardingError
from sharding.distributed import initialize, processes

CONNECT = """
import sys
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
        with pytest.raises(ShardingError, match="required: a free port"):
            sharding.initialize(f"127.0.0.1:{port}", 2, 0)


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


def test_the_coordinator_waits_for_all_others_which_go_on(monkeypatch: pytest.MonkeyPatch):
    times = {}

    def wait(index):
        time.sleep(0.1 * index)
        processes.coordinator_waits("end")
        times[index] = time.monotonic()

    assert process_threads.run(monkeypatch, wait, 3) == [None] * 3
    assert times[1] < times[2] <= times[0]
    monkeypatch.setattr(processes, "_TIMEOUT_SECONDS", 0.2)
    (error, _, none) = process_threads.run(monkeypatch, lambda i: i != 1 and processes.coordinator_waits("end"), 3)
    assert "process 1 did not reach" in str(error) and none is None


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
