"""The head: starts the processes of a program on all hosts, watches them, and starts them again after a fault.

JAX's processes can't go on without one of them, and many faults leave the others waiting for ever or beyond the reach
of Python. So every fault is met alike: all are killed, at once, and start again from the newest checkpoint.
"""

import os
import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sharding import ShardingError, processes

from ..exit_codes import MISTAKE
from ..launch_config import Launch
from .channel import Channel, Event, Host
from .faults import Fault, Seen, how
from .kubernetes import POD
from .lines import Lines
from .messages import ALIVE_TIMEOUT

SETTLE = 0.5
"""Seconds in which other processes may end of the same fault: the one that began is told from those that followed."""

FORWARDED = ("JAX_", "XLA_", "LIBTPU_", "NCCL_")
"""Beginnings of the environment variables that all processes get as the launcher has them."""

STACKS = 1.0
"""Seconds for processes that hang to write where they are."""

FAILED = 1
"""Exit code where a process ended by a signal."""


@dataclass(kw_only=True)
class Supervisor:
    """Runs a program to its end."""

    config: Launch
    hosts: Sequence[Host]
    command: Sequence[str]
    lines: Lines
    _asked: list[int] = field(default_factory=list)
    """Signals that came for the head."""
    _met: bool = False
    """Whether any start has come as far as all processes meeting."""
    _first_step: float | None = None
    """Seconds until the first step ever was finished; None where none was."""

    def run(self) -> int:
        """The exit code of the program."""
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: Any) -> None:
        self._asked.append(number)

    def _run(self) -> int:
        hosts, restarts = list(self.hosts), 0
        while True:
            begun = time.monotonic()
            fault = _Start(self, hosts, restarts).run()
            if fault is None:
                # A pod that was told to stop has not done its work: the set is to start again elsewhere.
                return FAILED if POD in os.environ and self._asked else 0
            after = f", {time.monotonic() - begun:.0f} s after the start" if restarts else ""
            self.lines.say(fault.what + after)
            left = [host for host in hosts if host not in fault.gone]
            if self._asked or not fault.again or restarts == self.config.restarts:
                return self._give_up(fault, restarts)
            if fault.gone and restarts and left and self.config.elastic:
                # A host that does not come back at the next start is gone for good.
                hosts = _numbered(left)
                self.lines.say(f"going on without {', '.join(host.name for host in fault.gone)}")
            restarts += 1
            self.lines.say(f"restart {restarts} of {self.config.restarts}, from the newest checkpoint")

    def _give_up(self, fault: Fault, restarts: int) -> int:
        if restarts:
            self.lines.say(f"given up after {restarts} restart{'s' * (restarts > 1)}")
        if fault.error:
            self.lines.say("the error that came first:")
            for line in fault.error:
                self.lines.say(f"  {line}")
        return fault.code


class _Start:
    """One start of all processes, and what becomes of it."""

    def __init__(self, of: Supervisor, hosts: Sequence[Host], restarts: int):
        self.of, self.config, self.lines, self.hosts, self.restarts = of, of.config, of.lines, hosts, restarts
        self.events: queue.Queue[Event] = queue.Queue()
        self.channels: list[Channel] = []
        self.seen = {process: Seen(host=host) for host in hosts for process in host.processes}
        self.ports: dict[str, int] = {}
        self.closed: set[str] = set()
        self.asked = 0
        self.begun = time.monotonic()

    def run(self) -> Fault | None:
        """None where all processes ended well."""
        self.lines.forget()
        try:
            self.channels = [Channel(host, self.events, self._told(host)) for host in self.hosts]
            return self._gather() or self._watch()
        except FileNotFoundError as error:
            what = f"{error.filename}: not found"
            return Fault(what=what, code=MISTAKE, again=False, error=(f"{what}; install it, or add it to PATH",))
        finally:
            self._kill()
            for channel in self.channels:
                channel.close()
            self._drain()

    def _gather(self) -> Fault | None:
        """Wait for the agents, then tell them what to start."""
        deadline = time.monotonic() + self.config.connect_timeout
        while len(self.ports.keys() | self.closed) < len(self.hosts) and time.monotonic() < deadline:
            self._take(0.2)
            if self.of._asked:
                return Fault(what="stopped before the start", code=FAILED, again=False)
        away = [each for each in self.channels if each.host.name in self.closed or each.host.name not in self.ports]
        if away:
            return self._unreached(away)
        coordinator = self.config.coordinator or f"{self.hosts[0].address}:{self.ports[self.hosts[0].name]}"
        common, in_pod = self._environment(), POD in os.environ  # there its environment says who it is
        for channel in self.channels:
            starts = [
                {"process": process, "environment": {} if in_pod else common | self._who(process, place, coordinator)}
                for place, process in enumerate(channel.host.processes)
            ]
            if not channel.host.starts_itself:
                channel.send({"is": "start", "processes": starts, "command": list(self.of.command)})
        return None

    def _told(self, host: Host) -> list[str]:
        """What to start, where it is said behind a host's command."""
        pairs = [f"{name}={value}" for name, value in self._environment().items()]
        return [*pairs, "--", *self.of.command] if host.starts_itself else []

    def _environment(self) -> dict[str, str]:
        """What every process is told."""
        # ssh passes nothing on, and what changes programs must be the same everywhere.
        found = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        found[processes.RESTART] = str(self.restarts)
        found[processes.CONNECT_TIMEOUT] = str(self.config.connect_timeout)
        if self.config.devices_per_process:
            found[processes.CPU_DEVICES] = str(self.config.devices_per_process)
        return found | ({processes.ELASTIC: "1"} if self.config.elastic else {})

    def _who(self, process: int, place: int, coordinator: str) -> dict[str, str]:
        """What tells a process who it is."""
        found = {
            processes.COORDINATOR: coordinator,
            processes.NUM_PROCESSES: str(len(self.seen)),
            processes.PROCESS: str(process),
        }
        return found | ({processes.LOCAL_DEVICE: str(place)} if self.config.per == "gpu" else {})

    def _unreached(self, away: Sequence[Channel]) -> Fault:
        names = ", ".join(channel.host.name for channel in away)
        said = [line for channel in away for line in list(channel.stray)[-3:]] or [
            f"{each.host.name}: "
            + ("refused" if each.host.name in self.closed else f"no answer within {self.config.connect_timeout:g} s")
            for each in away
        ]
        error = ShardingError(
            f"start on {names}",
            there=said,
            must="a host is reached without a password, and has this Python and this folder",
            fix=[" ".join(away[0].host.command[:-1] or away[0].host.command) + " true", "--dry-run"],
        )
        return Fault(
            what=f"{names} can't be reached",
            code=MISTAKE,
            gone=tuple(channel.host for channel in away),
            again=self.of._met,
            error=tuple(str(error).splitlines()),
        )

    def _watch(self) -> Fault | None:
        self.begun = time.monotonic()
        while True:
            self._take(0.2)
            self._pass_on_signals()
            if all(seen.code == 0 for seen in self.seen.values()):
                return None
            if any(seen.code for seen in self.seen.values()) or self.closed:
                return self._ended()
            hung = self._hung()
            if hung:
                return hung

    def _take(self, seconds: float) -> None:
        """Take in what comes within so many seconds, until a process or an agent has ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=left)
            except queue.Empty:
                return
            self._note(event)
            if event.message is None or event.message["is"] == "exit":
                return

    def _settle(self, seconds: float) -> None:
        """Take in all that comes within so many seconds."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._take(left)

    def _drain(self) -> None:
        while not self.events.empty():
            event = self.events.get()
            if event.message is not None and event.message["is"] == "line":
                self._note(event)

    def _note(self, event: Event) -> None:
        message = event.message
        if message is None:
            if any(self.seen[process].code is None for process in event.host.processes):
                self.closed.add(event.host.name)
            return
        kind, now = message["is"], time.monotonic()
        if kind == "ready":
            self.ports[event.host.name] = message["port"]
        elif kind == "line":
            self.lines.add(message["process"], message["text"], is_error=message["is_error"])
        elif kind == "up":
            self.seen[message["process"]].up = True
            self.of._met |= all(seen.up for seen in self.seen.values())
        elif kind == "step":
            seen = self.seen[message["process"]]
            seen.step, seen.at = message["step"], now
            if self.of._first_step is None:
                self.of._first_step = now - self.begun
        elif kind == "compiling":
            seen = self.seen[message["process"]]
            seen.compiles, seen.at = True, now
        elif kind == "working":
            seen = self.seen[message["process"]]
            for each in self.seen.values() if seen.compiles else [seen]:  # the others may have waited for it
                each.at = now
            seen.compiles = False
        elif kind == "finished":
            seen = self.seen[message["process"]]
            seen.finished, seen.at = True, now
        elif kind == "exit":
            seen = self.seen[message["process"]]
            seen.code, seen.ended = message["code"], now

    def _pass_on_signals(self) -> None:
        if self.asked == len(self.of._asked):
            return
        self.asked = len(self.of._asked)
        if self.asked == 1:
            self.lines.say("stopping: all processes save at the same step; once more to stop at once")
            self.stopping = time.monotonic()
            for channel in self.channels:
                channel.stop()
        else:
            self._kill()

    def _kill(self) -> None:
        for channel in self.channels:
            channel.send({"is": "kill"})

    def _ended(self) -> Fault:
        """The fault of a start of which a process, or a host, has ended."""
        self._settle(SETTLE)
        bad = [process for process, seen in self.seen.items() if seen.code]
        if not bad:
            gone = tuple(host for host in self.hosts if host.name in self.closed)
            stray = [line for channel in self.channels if channel.host in gone for line in list(channel.stray)[-3:]]
            names = ", ".join(host.name for host in gone)
            return Fault(what=f"{names} is gone", code=FAILED, gone=gone, error=tuple(stray))
        first = min(bad, key=lambda process: self.seen[process].rank("\n".join(self.lines.error(process))))
        seen = self.seen[first]
        assert seen.code is not None
        where = f" on {seen.host.name}" if len(self.hosts) > 1 else ""
        after = f" after step {seen.step}" if seen.step is not None else ""
        return Fault(
            what=f"process {first}{where} {how(seen.code)}{after}",
            code=seen.code if seen.code > 0 else FAILED,
            error=tuple(self.lines.error(first)),
            again=self._may_pass(seen.code),
        )

    def _may_pass(self, code: int) -> bool:
        """Whether another start may end better: not after a mistake, nor after an error before any step."""
        if code == processes.UNREACHED:
            return self.of._met
        return code < 0 or (code != MISTAKE and self.of._first_step is not None)

    def _hung(self) -> Fault | None:
        """The fault of processes that say nothing for too long."""
        now, running = time.monotonic(), {p: seen for p, seen in self.seen.items() if seen.code is None}
        silent = [channel for channel in self.channels if now - channel.heard > ALIVE_TIMEOUT]
        if silent and not silent[0].host.starts_itself:
            names = ", ".join(channel.host.name for channel in silent)
            what = f"{names} was not heard of for {ALIVE_TIMEOUT:.0f} s"
            return Fault(what=what, code=FAILED, gone=tuple(channel.host for channel in silent))
        if self.asked and now - self.stopping > self.config.grace:
            return Fault(what=f"did not stop within {self.config.grace:g} s", code=FAILED, again=False)
        reporting = {p: seen for p, seen in running.items() if seen.step is not None}
        late = {p: seen for p, seen in reporting.items() if now - seen.at > self._patience(seen)}
        if late:
            least = min(seen.step or 0 for seen in late.values())
            where = ", ".join(str(p) for p, seen in late.items() if seen.step == least)
            return self._stuck(
                f"process {where}", f"no step for {max(map(self._patience, late.values())):g} s since step {least}"
            )
        limit = self._start_limit()
        if not reporting and limit is not None and now - self.begun > limit:
            return self._stuck("processes", f"no step within {limit:.0f} s")
        return None

    def _patience(self, seen: Seen) -> float:
        """Seconds of silence until a process that has finished steps is taken to hang."""
        silence, start = self.config.step_timeout + (self.config.grace if seen.finished else 0), self._start_limit()
        if start is not None and any(each.compiles for each in self.seen.values()):
            return max(silence, start)  # for those that wait for the one that compiles, too
        return silence

    def _start_limit(self) -> float | None:
        """Seconds until the first step: those asked for, or by what an earlier start took."""
        first = self.of._first_step
        if self.config.start_timeout is not None or first is None:
            return self.config.start_timeout
        return 3 * first + self.config.step_timeout

    def _stuck(self, who: str, what: str) -> Fault:
        for channel in self.channels:
            channel.send({"is": "stacks"})
        self._settle(STACKS)
        return Fault(what=f"{who}: {what}", code=FAILED, error=(f"{who} hangs: {what}",))


def _numbered(hosts: Sequence[Host]) -> list[Host]:
    """Hosts with processes numbered anew, from 0 on."""
    found, next_number = [], 0
    for host in hosts:
        numbers = tuple(range(next_number, next_number + len(host.processes)))
        found.append(replace(host, processes=numbers))
        next_number += len(numbers)
    return found
