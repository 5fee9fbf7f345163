"""Connecting processes: errors for inconsistent arguments, ports in use, and missing processes."""

import socket
import subprocess
import sys
import time

import pytest

import sharding
from sharding import ShardingError
from sharding.distributed import processes

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
