"""The processes of one program on several hosts: how they meet, compare what they are about to run, and stop together.

Every process runs the same script. `initialize` makes them one program, before anything else uses JAX; where a launcher
started them it says which process this is, on a cluster that JAX knows JAX finds out, and elsewhere the program is of
one process.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import faulthandler
import hashlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
import zlib
from base64 import b85decode, b85encode
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from types import TracebackType
from typing import Any

import jax

from . import compat
from .errors import ShardingError

COORDINATOR, NUM_PROCESSES, PROCESS = "SHARDING_COORDINATOR", "SHARDING_NUM_PROCESSES", "SHARDING_PROCESS"
"""Environment variables in which a launcher says who this process is: `host:port`, and two numbers."""

CPU_DEVICES = "SHARDING_CPU_DEVICES"
"""Environment variable: how many virtual devices a process has on a CPU."""

LOCAL_DEVICE = "SHARDING_LOCAL_DEVICE"
"""Environment variable: the one device of its host that a process has."""

PULSE = "SHARDING_PULSE"
"""Environment variable: the file descriptor on which a process reports its steps."""

UP = "up"
"""What is reported before any step: that all processes have met."""

FINISHED = "finished"
"""What is reported behind the last step."""

CONNECT_TIMEOUT = "SHARDING_CONNECT_TIMEOUT"
"""Environment variable: seconds until processes that have not come are missing."""

ELASTIC = "SHARDING_ELASTIC"
"""Environment variable: whether there may be fewer devices than the mesh was written for."""

RESTART = "SHARDING_RESTART"
"""Environment variable: how often the program was started again after a fault."""

UNREACHED = 75
"""Exit code of a process that did not find the others: what BSD's sysexits calls a failure that may pass."""

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NCCL_ALGO", "NCCL_PROTO")
"""Environment variables that change what is compiled or how devices communicate."""

SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
"""JAX's configuration as far as it changes what is computed or compiled."""

_SAID_BYTES = 3 << 20
"""The coordinator takes messages of up to 4 MiB."""

_numbers = itertools.count()
"""Of meetings: all processes have the same ones in the same order."""

_answer_seconds = 600.0


class Unreached(ShardingError):
    """The other processes, or their coordinator, were not found in time."""


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process: int | None = None,
    *,
    timeout: float | None = None,
    heartbeat: int = 10,
) -> None:
    """Make this process one of the program's processes. Called once by each, before anything else uses JAX.

    Args:
        coordinator: `host:port` where process 0 listens, on that address alone, and where all others find it.
        num_processes: how many there are.
        process: the number of this one, from 0 on.
        timeout: seconds until those that have not come are missing; 30 where a launcher says nothing else.
        heartbeat: seconds after which a process that is not heard of is given up, and with it the program.

    With none of the first three they are what `sharding launch` says; without it what JAX finds out about the cluster
    (Slurm, Open MPI, Cloud TPU, Kubernetes); without any of these the program has one process, as it has where
    `num_processes` is 1. A second call does nothing.

    Raises:
        ShardingError: numbers that don't fit each other, a port in use, a coordinator or processes that can't be
            reached in time, or a process of another version of JAX or with other flags.
    """
    if jax.distributed.is_initialized():
        return
    given = (coordinator, num_processes, process)
    asked = f"sharding.initialize({', '.join(map(repr, given)) if any(g is not None for g in given) else ''})"
    place = _place(given, asked)
    if place is None:
        return
    if CPU_DEVICES in os.environ:
        jax.config.update("jax_num_cpu_devices", int(os.environ[CPU_DEVICES]))
    timeout = float(os.environ.get(CONNECT_TIMEOUT, 30)) if timeout is None else timeout
    _meet(place, asked, timeout=timeout, heartbeat=heartbeat)
    _end_at_once_after_an_error()
    if PULSE in os.environ and sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    agree(_versions() | _flags(), about=asked)
    _report(UP)


def index() -> int:
    """The number of this process; starts no backend."""
    return compat.distributed().process_id


def count() -> int:
    """The number of processes; starts no backend."""
    return compat.distributed().num_processes


def said(topic: str, text: str) -> list[str]:
    """What each process says on a topic, in their order. All call this, as often and in the same order.

    Raises:
        ShardingError: a process did not answer in time.
    """
    if count() == 1:
        return [text]
    client, key = compat.distributed().client, f"sharding/{next(_numbers)}"
    client.key_value_set(f"{key}/{index()}", f"{topic}\0{text}")
    deadline = time.monotonic() + _answer_seconds
    answers = [_answer(client, f"{key}/{other}", other, topic, deadline).split("\0", 1) for other in range(count())]
    elsewhere = [f"process {other} at {theirs!r}" for other, (theirs, _) in enumerate(answers) if theirs != topic]
    if elsewhere:
        raise ShardingError(
            f"process {index()} at {topic!r}", there=elsewhere, must="all processes do the same, in the same order"
        )
    return [text for _, text in answers]


def _answer(client: Any, key: str, other: int, topic: str, deadline: float) -> str:
    try:
        return client.blocking_key_value_get(key, max(1, int(1000 * (deadline - time.monotonic()))))
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
    raise Unreached(
        f"process {index()} at {topic!r}",
        there=[f"process {other} did not come here: {reason}"],
        must="all processes do the same, in the same order",
        fix="see where that process stands: its own lines, or `kill -USR1` for its stack",
    )


def barrier(name: str) -> None:
    """Wait until every process is here."""
    said(name, "")


def agree(facts: Mapping[str, str], *, about: str) -> None:
    """Compare facts with those of all other processes, before a difference becomes a hang.

    Args:
        facts: by name, what must be the same everywhere; a long text is compared by its hash first.
        about: what is going to be done, for the error.

    Raises:
        ShardingError: a process differs; says which one, in what, and for texts in which line.
    """
    if count() == 1:
        return
    names = sorted(facts)
    mine = [f"{name} {hashlib.sha256(facts[name].encode()).hexdigest()}" for name in names]
    table = [text.split("\n") for text in said(about, "\n".join(mine))]
    if all(row == table[0] for row in table):
        return
    texts = [_packed(row) for row in said(f"{about}: differences", _pack("\0".join(f"{n}\1{facts[n]}" for n in names)))]
    usual = max(table, key=table.count)
    first = table.index(usual)
    there = [
        line
        for other, row in enumerate(table)
        if row != usual
        for line in _differences(other, texts[other], first, texts[first])
    ]
    raise ShardingError(
        about,
        there=there,
        must="every process runs the same program with the same versions, flags, mesh and data",
        fix="the same environment and the same script on every host",
    )


def check_same_program(function: str, text: str) -> None:
    """Compare a lowered program with that of every other process. Raises as `agree` does."""
    agree({"program": text}, about=f"compile {function}")


def stops(step: int) -> bool:
    """Whether to save and stop before `step`, since some process was told to (SIGTERM): all hear it at the same step.

    Every process must ask before every step. Where there is one process, signals are its own affair.
    """
    if count() == 1:
        return False
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


def done(step: int) -> None:
    """Report that `step` was finished, to the supervisor that started this process, if there is one.

    From the second report on it takes silence for a hang.
    """
    _report(str(step))


def finished() -> None:
    """Report that there are no more steps: what is still to do may take its time."""
    _report(FINISHED)


def _report(text: str) -> None:
    if PULSE in os.environ:
        with contextlib.suppress(OSError):
            os.write(int(os.environ[PULSE]), f"{text}\n".encode())


def leave(code: int) -> None:
    """End this process at once where others may wait for it in vain: JAX's own way out waits for all of them."""
    if count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Who this process is."""

    coordinator: str
    num_processes: int
    process: int
    local_devices: tuple[int, ...] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def _place(given: tuple[str | None, int | None, int | None], asked: str) -> _Place | None:
    """Who this process is, or None where it is alone."""
    env, local = os.environ, None
    if all(value is None for value in given) and COORDINATOR in env:
        given = (env[COORDINATOR], int(env[NUM_PROCESSES]), int(env[PROCESS]))
        local = (int(env[LOCAL_DEVICE]),) if LOCAL_DEVICE in env else None
    elif all(value is None for value in given):
        *_, local = found = compat.detected_cluster()
        if found[0] is None:
            return None
        given = found[:3]
    coordinator, num_processes, process = given
    if num_processes == 1:
        return None
    there = []
    if coordinator is None or num_processes is None or process is None:
        there.append("all three of coordinator, num_processes and process are given, or none")
    else:
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdigit() and 0 < int(port) < 2**16):
            there.append(f"coordinator {coordinator!r} is not host:port")
        if num_processes < 1 or not 0 <= process < num_processes:
            there.append(f"process {process} of {num_processes}")
        if not there:
            devices = None if local is None else tuple(local)
            return _Place(coordinator=coordinator, num_processes=num_processes, process=process, local_devices=devices)
    raise ShardingError(
        asked,
        there=there,
        must="processes are numbered from 0 on, and know where process 0 listens",
        fix='sharding.initialize("10.0.0.1:1234", num_processes=2, process=0)',
    )


def _meet(place: _Place, asked: str, *, timeout: float, heartbeat: int) -> None:
    deadline = time.monotonic() + timeout
    if place.process == 0:
        _check_free(place, asked)
    else:
        _reach(place, asked, deadline)
    # JAX would listen on every interface.
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", place.coordinator)
    missing = Unreached(
        asked,
        there=f"not all of {place.num_processes} processes came within {timeout:g} s",
        must="as many processes are started as there are to be",
        fix="start the others too, or a smaller num_processes",
    )
    # JAX aborts where a process does not come. What is said instead has to be said before that.
    timer = threading.Timer(max(0.1, deadline - time.monotonic()), _give_up, [missing])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process,
            local_device_ids=place.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=round(timeout) + 30,
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=heartbeat,
        )
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
    else:
        barrier("met")
        return
    finally:
        timer.cancel()
    raise Unreached(asked, there=reason, must="the processes find each other in time")


def _give_up(error: Unreached) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(UNREACHED)


def _check_free(place: _Place, asked: str) -> None:
    """Raise an error if this process can't listen where it is to."""
    host, port = place.address
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        raise Unreached(
            asked,
            there=f"process 0 can't listen at {place.coordinator}: {error.strerror or error}",
            must="the port is free" if used else "the coordinator's address is one of process 0's host",
            fix=f"{host}:{_free_port(host)}" if used else f"an address of {socket.gethostname()}",
        ) from None


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def _reach(place: _Place, asked: str, deadline: float) -> None:
    """Wait until something listens at the coordinator's address: JAX itself says nothing about why nothing does."""
    while True:
        try:
            socket.create_connection(place.address, timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() < deadline and not isinstance(error, socket.gaierror):
                time.sleep(0.1)
                continue
            raise Unreached(
                asked,
                there=f"process {place.process} on {socket.gethostname()} can't reach the coordinator at "
                f"{place.coordinator}: {error.strerror or error}",
                must="process 0 listens there, and the network lets others through",
                fix="start process 0, look at the firewall, or name an address that this host can reach",
            ) from None


def _end_at_once_after_an_error() -> None:
    """Without this a process that fails waits at the exit for others, and they wait for it in a collective."""
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        leave(UNREACHED if isinstance(error, Unreached) else 1)

    if not hasattr(sys, "ps1"):
        sys.excepthook = excepthook


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}


def _flags() -> dict[str, str]:
    """What else decides how a program is compiled."""
    flags = {name: os.environ[name] for name in FLAGS if name in os.environ}
    return flags | {name: str(getattr(jax.config, name)) for name in SETTINGS}


def _pack(text: str) -> str:
    packed = b85encode(zlib.compress(text.encode())).decode()
    return packed if len(packed) <= _SAID_BYTES else ""


def _packed(text: str) -> dict[str, str]:
    whole = zlib.decompress(b85decode(text)).decode() if text else ""
    return dict(part.split("\1", 1) for part in whole.split("\0") if part)


def _differences(other: int, theirs: Mapping[str, str], first: int, usual: Mapping[str, str]) -> list[str]:
    """In what one process differs from another, a line for each fact."""
    if not (theirs and usual):
        return [f"process {other} differs from process {first}, in texts too long to compare here"]
    lines = []
    for name in sorted(theirs.keys() | usual.keys()):
        one, two = theirs.get(name, ""), usual.get(name, "")
        if one != two:
            lines.append(f"process {other} differs from process {first} in {name}: {_first_difference(one, two)}")
    return lines


def _first_difference(one: str, two: str) -> str:
    old, new = two.splitlines(), one.splitlines()
    if len(old) <= 1 and len(new) <= 1:
        return f"{one or 'none'}, not {two or 'none'}"
    pairs = itertools.zip_longest(new, old, fillvalue="")
    number, (mine, theirs) = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    changed = sum(line[0] in "+-" for line in difflib.ndiff(old, new)) if len(old) + len(new) < 400 else 0
    more = f" ({changed} lines in all)" if changed > 2 else ""
    return f"line {number} is {mine.strip()[:120]!r}, not {theirs.strip()[:120]!r}{more}"
