"""How the processes of one program on several hosts meet.

Every process runs the same script. `initialize` makes them one program, before anything else uses JAX; where a launcher
started them it says which process this is, on a cluster that JAX knows JAX finds out, and elsewhere the program is of
one process.
"""

from __future__ import annotations

import errno
import faulthandler
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from types import TracebackType

import jax

from . import compat, processes
from .errors import ShardingError

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NCCL_ALGO", "NCCL_PROTO")
"""Environment variables that change what is compiled or how devices communicate."""

SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
"""JAX's configuration as far as it changes what is computed or compiled."""


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
    if processes.CPU_DEVICES in os.environ:
        jax.config.update("jax_num_cpu_devices", int(os.environ[processes.CPU_DEVICES]))
    if place is None:
        return
    timeout = float(os.environ.get(processes.CONNECT_TIMEOUT, 30)) if timeout is None else timeout
    _meet(place, asked, timeout=timeout, heartbeat=heartbeat)
    _end_at_once_after_an_error()
    if processes.PULSE in os.environ and sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    processes.agree(_versions() | _flags(), about=asked)
    processes.report(processes.UP)


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
    if all(value is None for value in given) and processes.COORDINATOR in env:
        given = (env[processes.COORDINATOR], int(env[processes.NUM_PROCESSES]), int(env[processes.PROCESS]))
        local = (int(env[processes.LOCAL_DEVICE]),) if processes.LOCAL_DEVICE in env else None
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
    own = _free(place, asked) if place.process == 0 else _reached(place, asked, deadline)
    # JAX would listen on every interface.
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", place.coordinator)
    missing = _missing(place, own, asked, timeout)
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
        compat.gloo_at(own)
        processes.barrier("met")
        return
    finally:
        timer.cancel()
    raise processes.Unreached(asked, there=reason, must="the processes find each other in time")


def _missing(place: _Place, own: str, asked: str, timeout: float) -> processes.Unreached:
    """The error of processes that do not come."""
    there, fix = [f"not all of {place.num_processes} processes came within {timeout:g} s"], "start the others too"
    host, port = place.address
    if place.process == 0 and own != host and ipaddress.ip_address(own).is_loopback:
        there.append(f"on its own host {host!r} stands for {own}, where no other host finds process 0")
        fix = f"the host's address in the network, as in 10.0.0.1:{port}, for its name"
    must = "as many processes are started as there are to be, and reach process 0"
    return processes.Unreached(asked, there=there, must=must, fix=[fix, "a smaller num_processes"])


def _give_up(error: processes.Unreached) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(processes.UNREACHED)


def _free(place: _Place, asked: str) -> str:
    """The address where this process is to listen. Raises an error where it can't."""
    host, port = place.address
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            return listener.getsockname()[0]
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        raise processes.Unreached(
            asked,
            there=f"process 0 can't listen at {place.coordinator}: {error.strerror or error}",
            must="the port is free" if used else "the coordinator's address is one of process 0's host",
            fix=f"{host}:{processes.free_port(host)}" if used else f"an address of {socket.gethostname()}",
        ) from None


def _reached(place: _Place, asked: str, deadline: float) -> str:
    """This host's address on the coordinator's network, once something listens at the coordinator's address.

    JAX itself says nothing about why nothing does.
    """
    while True:
        try:
            with socket.create_connection(place.address, timeout=max(0.1, deadline - time.monotonic())) as found:
                return found.getsockname()[0]
        except OSError as error:
            if time.monotonic() < deadline and not isinstance(error, socket.gaierror):
                time.sleep(0.1)
                continue
            raise processes.Unreached(
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
        processes.leave(processes.UNREACHED if isinstance(error, processes.Unreached) else 1)

    if not hasattr(sys, "ps1"):
        sys.excepthook = excepthook


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}


def _flags() -> dict[str, str]:
    """What else decides how a program is compiled."""
    flags = {name: os.environ[name] for name in FLAGS if name in os.environ}
    return flags | {name: str(getattr(jax.config, name)) for name in SETTINGS}
