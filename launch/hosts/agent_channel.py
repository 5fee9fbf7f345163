"""The supervisor's connection to one agent: a command whose stdin and stdout are the agent's."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from .agent_messages import ALIVE_EVERY, Message, decode, encode

LAST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and the processes to run there."""

    name: str
    address: str
    """Its address for other hosts."""
    command: tuple[str, ...]
    """The command that runs the agent there."""
    processes: tuple[int, ...]
    """Their process numbers."""
    command_in_args: bool = False
    """Whether the program is passed as arguments of `command`, for launchers that forward no stdin."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A message from a host's agent; None if the agent is gone."""

    host: Host
    message: Message | None


class Channel:
    """A running agent, whose messages go into a queue."""

    def __init__(self, host: Host, events: "queue.Queue[Event]", args: Sequence[str] = ()):
        self.host, self._events = host, events
        self.stray: deque[str] = deque(maxlen=LAST_LINES)
        """The last lines that are not messages, such as errors of ssh or srun."""
        self.last_message = time.monotonic()
        """When its newest message came."""
        self._process = subprocess.Popen(
            [*host.command, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for the supervisor, which lets the processes save.
            start_new_session=True,
        )
        self._closed = threading.Event()
        assert self._process.stdout is not None and self._process.stderr is not None
        errors = threading.Thread(target=self._collect_stray, args=(self._process.stderr,), daemon=True)
        errors.start()
        threading.Thread(target=self._listen, args=(self._process.stdout, errors), daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; does nothing if the agent is gone."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):
            stdin.write(encode(message))
            stdin.flush()

    def stop(self) -> None:
        """Request that the processes save a checkpoint and exit."""
        if self.host.command_in_args:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        else:
            self.send({"is": "stop"})

    def close(self, seconds: float = 5.0) -> None:
        """Kill the agent and its processes."""
        self._closed.set()
        self.send({"is": "kill"})
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            # At the end of its stdin the agent kills its processes.
            self._process.stdin.close()
        if self.host.command_in_args:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _listen(self, stream: IO[bytes], errors: threading.Thread) -> None:
        with stream:
            for line in stream:
                message = decode(line)
                if message is None:
                    self.stray.append(line.decode(errors="replace").rstrip())
                else:
                    self.last_message = time.monotonic()
                    self._events.put(Event(host=self.host, message=message))
        errors.join(timeout=1.0)
        self._events.put(Event(host=self.host, message=None))

    def _collect_stray(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self.stray.append(line.decode(errors="replace").rstrip())

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(ALIVE_EVERY) and self._process.poll() is None:
            self.send({"is": "alive"})
