"""How processes meet: what is said of numbers that don't fit, ports in use, and processes that never come."""

import socket
import subprocess
import sys
import time

import pytest

import sharding
from sharding import ShardingError, processes

MEET = """
import sys
import sharding
sharding.initialize(sys.argv[1], 3, 0, timeout=3)
"""


def test_alone_it_does_nothing():
    sharding.initialize()
    sharding.initialize("127.0.0.1:1", 1, 0)
    assert (processes.index(), processes.count()) == (0, 1)
    assert processes.said("anything", "text") == ["text"]
    processes.agree({"program": "text"}, about="test")
    processes.barrier("test")
    assert not processes.stops(3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("127.0.0.1:1234", 2, None), "all three of"),
        (("127.0.0.1", 2, 0), "is not host:port"),
        (("127.0.0.1:99999", 2, 0), "is not host:port"),
        (("127.0.0.1:1234", 2, 2), "process 2 of 2"),
        (("127.0.0.1:1234", 0, 0), "process 0 of 0"),
    ],
)
def test_numbers_that_do_not_fit(given: tuple, said: str):
    with pytest.raises(ShardingError, match="numbered from 0 on") as caught:
        sharding.initialize(*given)
    assert any(said in line for line in caught.value.there)


def test_a_port_in_use():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ShardingError, match="the port is free"):
            sharding.initialize(f"127.0.0.1:{port}", 2, 0)


def test_an_address_of_another_host():
    with pytest.raises(ShardingError, match="is one of process 0's host"):
        sharding.initialize("192.0.2.1:1234", 2, 0)


def test_a_coordinator_that_is_not_there():
    begun = time.monotonic()
    with pytest.raises(ShardingError, match="can't reach the coordinator at 127.0.0.1:1: Connection refused"):
        sharding.initialize("127.0.0.1:1", 2, 1, timeout=1)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(("host", "is_name"), [("127.0.0.1", False), ("localhost", True)])
def test_processes_that_do_not_come(host: str, is_name: bool):
    port = processes.free_port("127.0.0.1")
    ran = subprocess.run(
        [sys.executable, "-c", MEET, f"{host}:{port}", "3", "0", "3"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == processes.UNREACHED
    assert "not all of 3 processes came within 3 s" in ran.stderr, ran.stderr
    assert ("where no other host finds process 0" in ran.stderr) == is_name


def test_a_difference_is_named():
    assert processes._first_difference("1.0", "2.0") == "1.0, not 2.0"
    assert processes._first_difference("a\nb\nx", "a\nc\nx") == "line 2 is 'b', not 'c'"
    assert processes._first_difference("a\nb", "a") == "line 2 is 'b', not ''"
