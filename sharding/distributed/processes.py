"""The processes of a multi-process program: their index and count, messages, barriers, and coordinated stops.

`sharding.initialize` connects them; a launcher passes each its index in the environment.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from typing import Any

from .. import compat
from ..errors import ShardingError

COORDINATOR, NUM_PROCESSES, PROCESS = "SHARDING_COORDINATOR", "SHARDING_NUM_PROCESSES", "SHARDING_PROCESS"
"""Environment variables set by a launcher: the coordinator's `host:port`, the number of processes, and the index."""

CPU_DEVICES = "SHARDING_CPU_DEVICES"
"""Environment variable: the number of virtual CPU devices per process."""

LOCAL_DEVICE = "SHARDING_LOCAL_DEVICE"
"""Environment variable: the local device of a process that has one."""

CONNECT_TIMEOUT = "SHARDING_CONNECT_TIMEOUT"
"""Environment variable: seconds to wait for all processes to connect."""

ELASTIC = "SHARDING_ELASTIC"
"""Environment variable: whether to accept fewer devices than the mesh has."""

RESTART = "SHARDING_RESTART"
"""Environment variable: the number of restarts after failure so far."""

CONNECT_ERROR = 75
"""Exit code of a process that failed to connect: a temporary failure (EX_TEMPFAIL in BSD's sysexits)."""

_call_numbers = itertools.count()
"""Numbers the collective calls: all processes make the same ones in the same order."""

_TIMEOUT_SECONDS = 600.0


class ConnectError(ShardingError):
    """The other processes or the coordinator were not reached in time."""


def index() -> int:
    """The index of this process, without initializing a backend."""
    return compat.distributed().process_id


def count() -> int:
    """The number of processes, without initializing a backend."""
    return compat.distributed().num_processes


def all_gather_text(topic: str, text: str) -> list[str]:
    """The text of every process, by index. All processes must call this with the same topics in the same order.

    Raises:
        ShardingError: a process did not reach this call in time, or is at another topic.
    """
    if count() == 1:
        return [text]
    client, key = compat.distributed().client, f"sharding/{next(_call_numbers)}"
    client.key_value_set(f"{key}/{index()}", f"{topic}\0{text}")
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    messages = [_message(client, f"{key}/{other}", other, topic, deadline).split("\0", 1) for other in range(count())]
    elsewhere = [f"process {other} at {theirs!r}" for other, (theirs, _) in enumerate(messages) if theirs != topic]
    if elsewhere:
        raise ShardingError(
            f"process {index()} at {topic!r}",
            found=elsewhere,
            required="the same calls in the same order in all processes",
        )
    return [text for _, text in messages]


def _message(client: Any, key: str, other: int, topic: str, deadline: float) -> str:
    try:
        return client.blocking_key_value_get(key, max(1, int(1000 * (deadline - time.monotonic()))))
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
    raise ConnectError(
        f"process {index()} at {topic!r}",
        found=[f"process {other} did not reach this barrier: {reason}"],
        required="the same calls in the same order in all processes",
        fix="check that process: its output, or its stack by `kill -USR1`",
    )


def coordinator_waits(topic: str) -> None:
    """Has process 0, whose exit ends the coordination service, wait for all others to reach this call; they go on."""
    if count() == 1:
        return
    client, key = compat.distributed().client, f"sharding/{next(_call_numbers)}"
    if index() != 0:
        client.key_value_set(f"{key}/{index()}", topic)
        return
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    for other in range(1, count()):
        _message(client, f"{key}/{other}", other, topic, deadline)


def barrier(name: str) -> None:
    """Waits until every process reaches this barrier."""
    all_gather_text(name, "")


def preempted(step: int) -> bool:
    """Whether to save and stop before `step` after a preemption (SIGTERM) of any process: the same in all processes.

    Every process must call this before every step. With one process, always False: the caller handles its own signals.
    """
    if count() == 1:
        return False
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


def is_address(text: str) -> bool:
    """Whether a text is `host:port`, with a host and a port that processes can connect to."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16


def free_port(host: str = "") -> int:
    """A free port of this host, or of one of its addresses."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def exit_if_multiprocess(code: int) -> None:
    """Exits immediately if there are other processes: JAX's shutdown would wait for them, and they for this one."""
    if count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
