"""`initialize`: connects the processes of a multi-process program.

Every process runs the same script and calls `initialize` before any other use of JAX. The process index comes from the
launcher or from JAX's cluster detection; without either, the program has a single process.
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
from types import TracebackType

import jax

from .. import compat
from ..errors import ShardingError
from . import consistency, processes
from . import heartbeat as reports


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process: int | None = None,
    *,
    timeout: float | None = None,
    heartbeat: int = 10,
) -> None:
    """Initializes `jax.distributed`. Call it once per process, before any other use of JAX.

    Args:
        coordinator: `host:port` on which process 0 listens, on that address only, and to which all others connect.
        num_processes: the number of processes.
        process: the index of this process, from 0.
        timeout: seconds to wait for all processes to connect; by default the launcher's, or else 30.
        heartbeat: seconds without a heartbeat after which a process counts as lost, which ends the program.

    The first three default to what `sharding launch` passes, or else to what JAX detects about the cluster (Slurm, Open
    MPI, Cloud TPU, Kubernetes). Without either, or if `num_processes` is 1, the program has a single process. A second
    call has no effect.

    Raises:
        ShardingError: inconsistent arguments, a port in use, a coordinator or processes that cannot be reached in time,
            or a process with other package versions or flags.
    """
    if jax.distributed.is_initialized():
        return
    given = (coordinator, num_processes, process)
    asked = f"sharding.initialize({', '.join(map(repr, given)) if any(g is not None for g in given) else ''})"
    identity = _identity(given, asked)
    if processes.CPU_DEVICES in os.environ:
        jax.config.update("jax_num_cpu_devices", int(os.environ[processes.CPU_DEVICES]))
    if identity is None:
        return
    timeout = float(os.environ.get(processes.CONNECT_TIMEOUT, 30)) if timeout is None else timeout
    _connect(identity, asked, timeout=timeout, heartbeat_timeout=heartbeat)
    _exit_immediately_on_error()
    if reports.HEARTBEAT_FD in os.environ and sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    # Without the arguments, which differ: all processes must be at the same topic.
    consistency.agree(consistency.versions() | consistency.flags(), about="sharding.initialize()")
    reports.report(reports.UP)


@dataclass(frozen=True, kw_only=True)
class _Identity:
    """This process within the program."""

    coordinator: str
    num_processes: int
    process: int
    local_devices: tuple[int, ...] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The coordinator's host and port."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def _identity(given: tuple[str | None, int | None, int | None], asked: str) -> _Identity | None:
    """The identity of this process, or None in a single-process program."""
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
    faults = []
    if coordinator is None or num_processes is None or process is None:
        faults.append("only some of coordinator, num_processes and process")
    else:
        if not processes.is_address(coordinator):
            faults.append(f"coordinator {coordinator!r} is not host:port")
        if not 0 <= process < num_processes:
            faults.append(f"process {process} of {num_processes}")
        if not faults:
            devices = None if local is None else tuple(local)
            return _Identity(
                coordinator=coordinator, num_processes=num_processes, process=process, local_devices=devices
            )
    raise ShardingError(
        asked,
        found=faults,
        required="a coordinator host:port, and 0 <= process < num_processes",
        fix='sharding.initialize("10.0.0.1:1234", num_processes=2, process=0)',
    )


def _connect(identity: _Identity, asked: str, *, timeout: float, heartbeat_timeout: int) -> None:
    deadline = time.monotonic() + timeout
    own = _bindable_address(identity, asked) if identity.process == 0 else _own_address(identity, asked, deadline)
    # By default JAX listens on every interface.
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", identity.coordinator)
    missing = _missing_error(identity, own, asked, timeout)
    # JAX aborts the process if another one is missing, so our error must come first.
    timer = threading.Timer(max(0.1, deadline - time.monotonic()), _exit_with, [missing])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            identity.coordinator,
            identity.num_processes,
            identity.process,
            local_device_ids=identity.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=round(timeout) + 30,
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=heartbeat_timeout,
        )
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
    else:
        compat.set_gloo_address(own)
        processes.barrier("connected")
        return
    finally:
        timer.cancel()
    raise processes.ConnectError(asked, found=reason, required="all processes connected in time")


def _missing_error(identity: _Identity, own: str, asked: str, timeout: float) -> processes.ConnectError:
    """The error for processes that do not connect."""
    found = [f"not all of {identity.num_processes} processes connected within {timeout:g} s"]
    fix = "start the other processes"
    host, port = identity.address
    if identity.process == 0 and own != host and ipaddress.ip_address(own).is_loopback:
        found.append(f"on its own host {host!r} resolves to {own}, which other hosts cannot reach")
        fix = f"the host's network address, as in 10.0.0.1:{port}, instead of its name"
    required = "num_processes running processes that can reach process 0"
    return processes.ConnectError(asked, found=found, required=required, fix=[fix, "a smaller num_processes"])


def _exit_with(error: processes.ConnectError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(processes.CONNECT_ERROR)


def _bindable_address(identity: _Identity, asked: str) -> str:
    """The address on which this process will listen. Raises an error if it cannot."""
    host, port = identity.address
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            return listener.getsockname()[0]
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise processes.ConnectError(
            asked,
            found=f"process 0 can't listen on {identity.coordinator}: {error.strerror or error}",
            required="a free port" if in_use else "an address of process 0's host",
            fix=f"{host}:{processes.free_port(host)}" if in_use else f"an address of {socket.gethostname()}",
        ) from None


def _own_address(identity: _Identity, asked: str, deadline: float) -> str:
    """This host's address on the coordinator's network, once something listens on the coordinator's address.

    JAX itself does not report why it cannot connect.
    """
    while True:
        try:
            with socket.create_connection(identity.address, timeout=max(0.1, deadline - time.monotonic())) as found:
                return found.getsockname()[0]
        except OSError as error:
            if time.monotonic() < deadline and not isinstance(error, socket.gaierror):
                time.sleep(0.1)
                continue
            raise processes.ConnectError(
                asked,
                found=f"process {identity.process} on {socket.gethostname()} can't reach the coordinator at "
                f"{identity.coordinator}: {error.strerror or error}",
                required="process 0 listening there, and a network that lets others connect",
                fix="start process 0, check the firewall, or pass an address that this host can reach",
            ) from None


def _exit_immediately_on_error() -> None:
    """Otherwise a failed process waits for the others at exit, and they wait for it in a collective."""
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        processes.exit_if_multiprocess(processes.CONNECT_ERROR if isinstance(error, processes.ConnectError) else 1)

    if not hasattr(sys, "ps1"):
        sys.excepthook = excepthook
