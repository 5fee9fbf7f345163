"""The head's end of the line to one agent: a command whose stdin and stdout are the agent's."""

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

from .messages import ALIVE_EVERY, Message, read, written

LAST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where an agent is to run."""

    name: str
    address: str
    """By which other hosts reach it."""
    command: tuple[str, ...]
    """What runs the agent there."""
    processes: tuple[int, ...]
    """Their numbers."""
    starts_itself: bool = False
    """Whether what to start is said behind the command, as to a program that passes no stdin on."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """What came from a host; without a message its agent is gone."""

    host: Host
    message: Message | None


class Channel:
    """An agent that runs, and what it says: put into a queue as it comes."""

    def __init__(self, host: Host, events: "queue.Queue[Event]", told: Sequence[str] = ()):
        self.host, self._events = host, events
        self.stray: deque[str] = deque(maxlen=LAST_LINES)
        """The last lines that were no messages: what ssh or srun say."""
        self.heard = time.monotonic()
        self._process = subprocess.Popen(
            [*host.command, *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for the head, which lets the processes save.
            start_new_session=True,
        )
        self._closed = threading.Event()
        assert self._process.stdout is not None and self._process.stderr is not None
        errors = threading.Thread(target=self._stray, args=(self._process.stderr,), daemon=True)
        errors.start()
        threading.Thread(target=self._listen, args=(self._process.stdout, errors), daemon=True).start()
        threading.Thread(target=self._live, daemon=True).start()

    def send(self, message: Message) -> None:
        """Say something; nothing happens where nobody hears it."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):
            stdin.write(written(message))
            stdin.flush()

    def stop(self) -> None:
        """Ask the processes to save and stop."""
        if self.host.starts_itself:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        else:
            self.send({"is": "stop"})

    def close(self, seconds: float = 5.0) -> None:
        """End the agent and its processes, at once."""
        self._closed.set()
        self.send({"is": "kill"})
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            # An agent that reads to the end of this kills what it started.
            self._process.stdin.close()
        if self.host.starts_itself:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _listen(self, stream: IO[bytes], errors: threading.Thread) -> None:
        for line in stream:
            message = read(line)
            if message is None:
                self.stray.append(line.decode(errors="replace").rstrip())
            else:
                self.heard = time.monotonic()
                self._events.put(Event(host=self.host, message=message))
        errors.join(timeout=1.0)
        self._events.put(Event(host=self.host, message=None))

    def _stray(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.stray.append(line.decode(errors="replace").rstrip())

    def _live(self) -> None:
        while not self._closed.wait(ALIVE_EVERY) and self._process.poll() is None:
            self.send({"is": "alive"})
