"""The supervisor: starts a program's processes on all hosts, monitors them, and restarts them after a failure.

JAX processes can't continue without one of them, and many failures leave the others blocked in native code. So every
failure is handled the same way: all processes are killed and restarted from the newest checkpoint.
"""

import os
import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sharding import ShardingError
from sharding.distributed import processes

from ..config.launch_config import Launch
from ..exit_codes import USER_ERROR
from .agent_channel import Channel, Event, Host
from .agent_messages import ALIVE_TIMEOUT
from .failures import Failure, ProcessStatus, describe_exit
from .kubernetes import POD
from .process_output import ProcessOutput

SETTLE = 0.5
"""Seconds to wait for other processes to exit of the same failure before looking for the one that failed first."""

FORWARDED = ("JAX_", "XLA_", "LIBTPU_", "NCCL_")
"""Prefixes of environment variables that the launcher forwards to all processes."""

STACKS = 1.0
"""Seconds for hung processes to print their stacks."""

FAILED = 1
"""Exit code if a process was killed by a signal."""


@dataclass(kw_only=True)
class Supervisor:
    """Runs a program to its end."""

    config: Launch
    hosts: Sequence[Host]
    command: Sequence[str]
    output: ProcessOutput
    _signals: list[int] = field(default_factory=list)
    """Signals that the supervisor received."""
    _connected: bool = False
    """Whether all processes of any attempt have connected to each other."""
    _first_step: float | None = None
    """Seconds until the first finished step of any attempt; None before."""

    def run(self) -> int:
        """Run the program; returns its exit code."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        self._signals.append(number)

    def _run(self) -> int:
        hosts, restarts = list(self.hosts), 0
        while True:
            started = time.monotonic()
            failure = _Attempt(self, hosts, restarts).run()
            if failure is None:
                # A pod stopped by a signal has not finished: a failure makes the JobSet start it elsewhere.
                return FAILED if POD in os.environ and self._signals else 0
            after = f", {time.monotonic() - started:.0f} s after the restart" if restarts else ""
            self.output.log(failure.what + after)
            remaining = [host for host in hosts if host not in failure.lost]
            if self._signals or not failure.retry or restarts == self.config.restarts:
                return self._give_up(failure, restarts)
            if failure.lost and restarts and remaining and self.config.elastic:
                # A host that is still unreachable at a restart is gone for good.
                hosts = _renumbered(remaining)
                self.output.log(f"continuing without {', '.join(host.name for host in failure.lost)}")
            restarts += 1
            self.output.log(f"restart {restarts} of {self.config.restarts}, from the newest checkpoint")

    def _give_up(self, failure: Failure, restarts: int) -> int:
        if restarts:
            self.output.log(f"giving up after {restarts} restart{'s' * (restarts > 1)}")
        if failure.error:
            self.output.log("first error:")
            for line in failure.error:
                self.output.log(f"  {line}")
        return failure.code


class _Attempt:
    """One start of all processes, until they exit or fail."""

    def __init__(self, supervisor: Supervisor, hosts: Sequence[Host], restarts: int):
        self.supervisor, self.config, self.output = supervisor, supervisor.config, supervisor.output
        self.hosts, self.restarts = hosts, restarts
        self.events: queue.Queue[Event] = queue.Queue()
        self.channels: list[Channel] = []
        self.status = {process: ProcessStatus(host=host) for host in hosts for process in host.processes}
        self.ports: dict[str, int] = {}
        self.closed: set[str] = set()
        self.num_signals = 0
        self.started = time.monotonic()

    def run(self) -> Failure | None:
        """None if all processes succeed."""
        self.output.forget_errors()
        try:
            self.channels = [Channel(host, self.events, self._arguments(host)) for host in self.hosts]
            return self._connect() or self._monitor()
        except FileNotFoundError as error:
            what = f"{error.filename}: not found"
            return Failure(what=what, code=USER_ERROR, retry=False, error=(f"{what}; install it, or add it to PATH",))
        finally:
            self._kill()
            for channel in self.channels:
                channel.close()
            self._drain()

    def _connect(self) -> Failure | None:
        """Wait for the agents, then send them what to start."""
        deadline = time.monotonic() + self.config.connect_timeout
        while len(self.ports.keys() | self.closed) < len(self.hosts) and time.monotonic() < deadline:
            self._receive(0.2)
            if self.supervisor._signals:
                return Failure(what="stopped before the start", code=FAILED, retry=False)
        missing = [each for each in self.channels if each.host.name in self.closed or each.host.name not in self.ports]
        if missing:
            return self._unreachable(missing)
        coordinator = self.config.coordinator or f"{self.hosts[0].address}:{self.ports[self.hosts[0].name]}"
        common, in_pod = self._environment(), POD in os.environ  # a pod's own environment has its process number
        for channel in self.channels:
            starts = [
                {
                    "process": process,
                    "environment": {} if in_pod else common | self._identity(process, local, coordinator),
                }
                for local, process in enumerate(channel.host.processes)
            ]
            if not channel.host.command_in_args:
                channel.send({"is": "start", "processes": starts, "command": list(self.supervisor.command)})
        return None

    def _arguments(self, host: Host) -> list[str]:
        """The program and its environment as arguments of the host's command, where the host needs them."""
        pairs = [f"{name}={value}" for name, value in self._environment().items()]
        return [*pairs, "--", *self.supervisor.command] if host.command_in_args else []

    def _environment(self) -> dict[str, str]:
        """The environment variables common to all processes."""
        # ssh forwards none, and those that change compilation must be equal everywhere.
        found = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        found[processes.RESTART] = str(self.restarts)
        found[processes.CONNECT_TIMEOUT] = str(self.config.connect_timeout)
        if self.config.devices_per_process:
            found[processes.CPU_DEVICES] = str(self.config.devices_per_process)
        return found | ({processes.ELASTIC: "1"} if self.config.elastic else {})

    def _identity(self, process: int, local: int, coordinator: str) -> dict[str, str]:
        """The environment variables that identify a process."""
        found = {
            processes.COORDINATOR: coordinator,
            processes.NUM_PROCESSES: str(len(self.status)),
            processes.PROCESS: str(process),
        }
        return found | ({processes.LOCAL_DEVICE: str(local)} if self.config.per == "gpu" else {})

    def _unreachable(self, missing: Sequence[Channel]) -> Failure:
        names = ", ".join(channel.host.name for channel in missing)
        reasons = [line for channel in missing for line in list(channel.stray)[-3:]] or [
            f"{each.host.name}: "
            + ("refused" if each.host.name in self.closed else f"no answer within {self.config.connect_timeout:g} s")
            for each in missing
        ]
        error = ShardingError(
            f"start on {names}",
            found=reasons,
            required="login without a password, and this Python and folder on every host",
            fix=[" ".join(missing[0].host.command[:-1] or missing[0].host.command) + " true", "--dry-run"],
        )
        return Failure(
            what=f"{names} can't be reached",
            code=USER_ERROR,
            lost=tuple(channel.host for channel in missing),
            retry=self.supervisor._connected,
            error=tuple(str(error).splitlines()),
        )

    def _monitor(self) -> Failure | None:
        self.started = time.monotonic()
        while True:
            self._receive(0.2)
            self._forward_signals()
            if all(status.code == 0 for status in self.status.values()):
                return None
            if any(status.code for status in self.status.values()) or self.closed:
                return self._exit_failure()
            hang = self._hang_failure()
            if hang:
                return hang

    def _receive(self, seconds: float) -> None:
        """Handle events for at most so many seconds, until a process or an agent exits."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=left)
            except queue.Empty:
                return
            self._handle(event)
            if event.message is None or event.message["is"] == "exit":
                return

    def _settle(self, seconds: float) -> None:
        """Handle all events for so many seconds."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._receive(left)

    def _drain(self) -> None:
        while not self.events.empty():
            event = self.events.get()
            if event.message is not None and event.message["is"] == "line":
                self._handle(event)

    def _handle(self, event: Event) -> None:
        message = event.message
        if message is None:
            if any(self.status[process].code is None for process in event.host.processes):
                self.closed.add(event.host.name)
            return
        kind, now = message["is"], time.monotonic()
        if kind == "ready":
            self.ports[event.host.name] = message["port"]
        elif kind == "line":
            self.output.add(message["process"], message["text"], is_error=message["is_error"])
        elif kind == "up":
            self.status[message["process"]].up = True
            self.supervisor._connected |= all(status.up for status in self.status.values())
        elif kind == "step":
            status = self.status[message["process"]]
            status.step, status.last_report = message["step"], now
            if self.supervisor._first_step is None:
                self.supervisor._first_step = now - self.started
        elif kind == "compiling":
            status = self.status[message["process"]]
            status.compiling, status.last_report = True, now
        elif kind == "working":
            status = self.status[message["process"]]
            # The other processes may have waited for one that was compiling.
            for each in self.status.values() if status.compiling else [status]:
                each.last_report = now
            status.compiling = False
        elif kind == "finished":
            status = self.status[message["process"]]
            status.finished, status.last_report = True, now
        elif kind == "exit":
            status = self.status[message["process"]]
            status.code, status.exited = message["code"], now

    def _forward_signals(self) -> None:
        if self.num_signals == len(self.supervisor._signals):
            return
        self.num_signals = len(self.supervisor._signals)
        if self.num_signals == 1:
            self.output.log("stopping: all processes save at the same step; repeat to stop immediately")
            self.stopping = time.monotonic()
            for channel in self.channels:
                channel.stop()
        else:
            self._kill()

    def _kill(self) -> None:
        for channel in self.channels:
            channel.send({"is": "kill"})

    def _exit_failure(self) -> Failure:
        """The failure of an attempt in which a process or an agent has exited."""
        self._settle(SETTLE)
        failed = [process for process, status in self.status.items() if status.code]
        if not failed:
            lost = tuple(host for host in self.hosts if host.name in self.closed)
            stray = [line for channel in self.channels if channel.host in lost for line in list(channel.stray)[-3:]]
            names = ", ".join(host.name for host in lost)
            return Failure(what=f"lost {names}", code=FAILED, lost=lost, error=tuple(stray))
        first = min(
            failed, key=lambda process: self.status[process].root_cause_order("\n".join(self.output.error(process)))
        )
        status = self.status[first]
        assert status.code is not None
        where = f" on {status.host.name}" if len(self.hosts) > 1 else ""
        after = f" after step {status.step}" if status.step is not None else ""
        return Failure(
            what=f"process {first}{where} {describe_exit(status.code)}{after}",
            code=status.code if status.code > 0 else FAILED,
            error=tuple(self.output.error(first)),
            retry=self._may_succeed_later(status.code),
        )

    def _may_succeed_later(self, code: int) -> bool:
        """Whether another attempt may succeed: not after a user error, nor after an error before the first step."""
        if code == processes.CONNECT_ERROR:
            return self.supervisor._connected
        return code < 0 or (code != USER_ERROR and self.supervisor._first_step is not None)

    def _hang_failure(self) -> Failure | None:
        """The failure of processes without a heartbeat for too long."""
        now, running = time.monotonic(), {p: status for p, status in self.status.items() if status.code is None}
        silent = [channel for channel in self.channels if now - channel.last_message > ALIVE_TIMEOUT]
        if silent and not silent[0].host.command_in_args:
            names = ", ".join(channel.host.name for channel in silent)
            what = f"no heartbeat from {names} for {ALIVE_TIMEOUT:.0f} s"
            return Failure(what=what, code=FAILED, lost=tuple(channel.host for channel in silent))
        if self.num_signals and now - self.stopping > self.config.grace:
            return Failure(what=f"did not stop within {self.config.grace:g} s", code=FAILED, retry=False)
        reporting = {p: status for p, status in running.items() if status.step is not None}
        late = {p: status for p, status in reporting.items() if now - status.last_report > self._timeout(status)}
        if late:
            step = min(status.step or 0 for status in late.values())
            where = ", ".join(str(p) for p, status in late.items() if status.step == step)
            return self._hung(
                f"process {where}", f"no step for {max(map(self._timeout, late.values())):g} s since step {step}"
            )
        limit = self._start_timeout()
        if not reporting and limit is not None and now - self.started > limit:
            return self._hung("processes", f"no step within {limit:.0f} s")
        return None

    def _timeout(self, status: ProcessStatus) -> float:
        """Seconds without a heartbeat until a process that has finished steps counts as hung."""
        timeout = self.config.step_timeout + (self.config.grace if status.finished else 0)
        start_timeout = self._start_timeout()
        if start_timeout is not None and any(each.compiling for each in self.status.values()):
            return max(timeout, start_timeout)  # also for those that wait for the one that compiles
        return timeout

    def _start_timeout(self) -> float | None:
        """Seconds until the first step: the option, or derived from the first step of an earlier attempt."""
        first = self.supervisor._first_step
        if self.config.start_timeout is not None or first is None:
            return self.config.start_timeout
        return 3 * first + self.config.step_timeout

    def _hung(self, who: str, what: str) -> Failure:
        for channel in self.channels:
            channel.send({"is": "stacks"})
        self._settle(STACKS)
        return Failure(what=f"{who}: {what}", code=FAILED, error=(f"{who} hangs: {what}",))


def _renumbered(hosts: Sequence[Host]) -> list[Host]:
    """The hosts with processes renumbered from 0."""
    found, next_number = [], 0
    for host in hosts:
        numbers = tuple(range(next_number, next_number + len(host.processes)))
        found.append(replace(host, processes=numbers))
        next_number += len(numbers)
    return found
