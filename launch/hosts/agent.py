"""The agent of one host: starts its processes, forwards their output and heartbeats, and leaves none behind.

    python -m sharding.launch.hosts.agent                     # reads what to start from stdin, see `agent_messages`
    python -m sharding.launch.hosts.agent A=1 -- python x.py  # starts this, with the rank that mpirun assigned

The processes are killed when stdin ends or no message comes from the supervisor for ten seconds.
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

from sharding.distributed import heartbeat, processes

from .agent_messages import ALIVE_EVERY, ALIVE_TIMEOUT, Message, decode, encode
from .clusters import mpi_rank

_SIGNALS = {"stop": signal.SIGTERM, "stacks": signal.SIGUSR1, "kill": signal.SIGKILL}


def main() -> None:
    """Serve one attempt, from the first message to the exit of the last process."""
    # Threads forward lines of several processes; the lock keeps each line intact.
    lock, out = threading.Lock(), sys.stdout.buffer

    def send(message: Message) -> None:
        with lock, contextlib.suppress(OSError):
            out.write(encode(message))
            out.flush()

    events: queue.Queue[Message] = queue.Queue()
    signal.signal(signal.SIGTERM, lambda *_: events.put({"is": "stop"}))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    args = sys.argv[1:]
    if args:
        separator = args.index("--")
        environment = dict(pair.split("=", 1) for pair in args[:separator])
        starts = [{"process": mpi_rank(), "environment": environment}]
        events.put({"is": "start", "command": args[separator + 1 :], "processes": starts})
    else:
        messages = os.fdopen(os.dup(sys.stdin.fileno()), "rb")  # `sys.stdin` itself cannot be closed while it is read
        threading.Thread(target=_listen, args=(messages, events), daemon=True).start()
    agent = Agent(send, events)
    send({"is": "ready", "name": socket.gethostname(), "port": processes.free_port()})
    try:
        agent.serve(needs_supervisor=not args)
    finally:
        agent.kill()


class Agent:
    """The processes of one host."""

    def __init__(self, send: Callable[[Message], None], events: "queue.Queue[Message]"):
        self._send, self._events = send, events
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def serve(self, *, needs_supervisor: bool) -> None:
        """Handle messages until all processes have exited or, if `needs_supervisor`, the supervisor is lost."""
        received = sent = time.monotonic()
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
                    received = time.monotonic()
                if kind == "start":
                    started = True
                    for process in message["processes"]:
                        self._start(process["process"], message["command"], process["environment"])
                elif kind in _SIGNALS:
                    self._signal(_SIGNALS[kind])
            now = time.monotonic()
            if needs_supervisor and now - received > ALIVE_TIMEOUT:
                return
            if now - sent > ALIVE_EVERY:
                self._send({"is": "alive"})
                sent = now

    def kill(self) -> None:
        """Kill all processes and their children."""
        self._signal(signal.SIGKILL)
        for process in self._running.values():
            process.wait()

    def _start(self, number: int, command: list[str], environment: dict[str, str]) -> None:
        read_end, write_end = os.pipe()
        variables = os.environ | environment | {heartbeat.HEARTBEAT_FD: str(write_end), "PYTHONUNBUFFERED": "1"}
        try:
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[write_end],
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            os.close(read_end)
            self._send({"is": "line", "process": number, "text": f"{command[0]}: {error.strerror}", "is_error": True})
            self._send({"is": "exit", "process": number, "code": 127})
            return
        finally:
            os.close(write_end)
        self._running[number] = process
        assert process.stdout is not None and process.stderr is not None
        forwarding = [
            self._thread(self._forward_output, number, process.stdout, False),
            self._thread(self._forward_output, number, process.stderr, True),
            self._thread(self._forward_reports, number, os.fdopen(read_end, "rb")),
        ]
        self._thread(self._await, number, process, forwarding)

    def _thread(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    def _forward_output(self, number: int, stream: IO[bytes], is_error: bool) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                self._send({"is": "line", "process": number, "text": text, "is_error": is_error})

    def _forward_reports(self, number: int, pulse: IO[bytes]) -> None:
        with pulse:
            for line in pulse:
                text = line.strip().decode()
                message = {"is": text} if text in heartbeat.STATUSES else {"is": "step", "step": int(text)}
                self._send(message | {"process": number})

    def _await(self, number: int, process: subprocess.Popen[bytes], forwarding: list[threading.Thread]) -> None:
        code = process.wait()
        for thread in forwarding:
            # With a timeout: a grandchild may keep the pipes open.
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
                # A kill reaches the children too; SIGTERM only the process, which may stop its children itself.
                (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)


def _listen(stream: IO[bytes], events: "queue.Queue[Message]") -> None:
    for line in stream:
        message = decode(line)
        if message is not None:
            events.put(message)
    events.put({"is": "gone"})


def _die_with_parent() -> None:
    """Make the kernel kill this process when the agent dies; on Linux (prctl, PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
