"""On each host: start its processes, pass on what they print and report, and leave none of them behind.

    python -m sharding.launch.hosts.agent                     # is told what to start on stdin, by `messages`
    python -m sharding.launch.hosts.agent A=1 -- python x.py  # starts this, as the process that the cluster says it is

Where stdin ends, or the head is not heard of for ten seconds, the processes are killed.
"""

import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from sharding import processes

from .messages import ALIVE_EVERY, ALIVE_TIMEOUT, Message, read, written

_SIGNALS = {"stop": signal.SIGTERM, "stacks": signal.SIGUSR1, "kill": signal.SIGKILL}


def main() -> None:
    """Serve one start, from the first message to the end of the last process."""
    # A line that is on its way from a process of ours must not be mixed with that of another thread.
    lock, out = threading.Lock(), sys.stdout.buffer

    def send(message: Message) -> None:
        with lock, contextlib.suppress(OSError):
            out.write(written(message))
            out.flush()

    events: queue.Queue[Message] = queue.Queue()
    signal.signal(signal.SIGTERM, lambda *_: events.put({"is": "stop"}))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = sys.argv[1:]
    if told:
        mark = told.index("--")
        environment = dict(pair.split("=", 1) for pair in told[:mark])
        starts = [{"process": _rank(), "environment": environment}]
        events.put({"is": "start", "command": told[mark + 1 :], "processes": starts})
    else:
        threading.Thread(target=_listen, args=(sys.stdin.buffer, events), daemon=True).start()
    agent = Agent(send, events)
    send({"is": "ready", "name": socket.gethostname(), "port": processes.free_port()})
    try:
        agent.serve(leashed=not told)
    finally:
        agent.kill()


class Agent:
    """The processes of one host."""

    def __init__(self, send: Callable[[Message], None], events: "queue.Queue[Message]"):
        self._send, self._events = send, events
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def serve(self, *, leashed: bool) -> None:
        """Do what is asked until all processes have ended, or, if `leashed`, the head is gone."""
        heard = sent = time.monotonic()
        started = False
        while not started or self._running:
            with contextlib.suppress(queue.Empty):
                message = self._events.get(timeout=ALIVE_EVERY / 2)
                kind = message["is"]
                if kind == "gone":
                    return
                if kind == "exit":
                    self._ended(message)
                else:
                    heard = time.monotonic()
                if kind == "start":
                    started = True
                    for process in message["processes"]:
                        self._start(process["process"], message["command"], process["environment"])
                elif kind in _SIGNALS:
                    self._signal(_SIGNALS[kind])
            now = time.monotonic()
            if leashed and now - heard > ALIVE_TIMEOUT:
                return
            if now - sent > ALIVE_EVERY:
                self._send({"is": "alive"})
                sent = now

    def kill(self) -> None:
        """End all processes at once, with what they started."""
        self._signal(signal.SIGKILL)
        for process in self._running.values():
            process.wait()

    def _start(self, number: int, command: list[str], environment: dict[str, str]) -> None:
        ours, theirs = os.pipe()
        variables = os.environ | environment | {processes.PULSE: str(theirs), "PYTHONUNBUFFERED": "1"}
        try:
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs],
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            os.close(ours)
            self._send({"is": "line", "process": number, "text": f"{command[0]}: {error.strerror}", "is_error": True})
            self._send({"is": "exit", "process": number, "code": 127})
            return
        finally:
            os.close(theirs)
        self._running[number] = process
        assert process.stdout is not None and process.stderr is not None
        passing = [
            self._thread(self._pass_on, number, process.stdout, False),
            self._thread(self._pass_on, number, process.stderr, True),
            self._thread(self._report, number, os.fdopen(ours, "rb")),
        ]
        self._thread(self._await, number, process, passing)

    def _thread(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    def _pass_on(self, number: int, stream: IO[bytes], is_error: bool) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            self._send({"is": "line", "process": number, "text": text, "is_error": is_error})

    def _report(self, number: int, pulse: IO[bytes]) -> None:
        for line in pulse:
            text = line.strip().decode()
            what = {"is": text} if text in processes.SIGNS else {"is": "step", "step": int(text)}
            self._send(what | {"process": number})

    def _await(self, number: int, process: subprocess.Popen[bytes], passing: list[threading.Thread]) -> None:
        code = process.wait()
        for thread in passing:
            # Not for ever: a grandchild may hold the pipes open.
            thread.join(timeout=1.0)
        self._events.put({"is": "exit", "process": number, "code": code})

    def _ended(self, message: Message) -> None:
        process = self._running.pop(message["process"])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._send(message)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                # What a process started ends with it, but is not asked to stop: that is the process's own affair.
                (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)


def _rank() -> int:
    """The number that mpirun gave this agent."""
    return int(next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ))


def _listen(stream: IO[bytes], events: "queue.Queue[Message]") -> None:
    for line in stream:
        message = read(line)
        if message is not None:
            events.put(message)
    events.put({"is": "gone"})


def _die_with_parent() -> None:
    """Has the kernel kill this process when the agent dies; on Linux (prctl, PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
