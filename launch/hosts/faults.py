"""Faults: what is known of the processes of a start, and with which of them a fault began."""

import signal
from dataclasses import dataclass

from ..exit_codes import MISTAKE
from .channel import Host

_FOLLOWS = ("Gloo", "coordination service", "CoordinationService", "Connection reset by peer", "heartbeat")
"""Errors of processes that lost another one."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a start ended before its program did."""

    what: str
    code: int
    error: tuple[str, ...] = ()
    """What the process said that began."""
    again: bool = True
    """Whether another start may help."""
    gone: tuple[Host, ...] = ()
    """Hosts that did not answer."""


@dataclass(kw_only=True)
class Seen:
    """What is known of one process."""

    host: Host
    up: bool = False
    step: int | None = None
    at: float = 0.0
    """When it gave its last sign of life."""
    compiles: bool = False
    """Whether it compiles a program."""
    finished: bool = False
    """Whether there are no more steps."""
    code: int | None = None
    ended: float = 0.0

    def rank(self, error: str) -> tuple[int, float]:
        """Lower for a process whose end is more likely where a fault began, by what it said as an error."""
        if self.code is not None and self.code < 0 and self.code != -signal.SIGABRT:
            kind = 0
        elif self.code == MISTAKE:
            kind = 1
        elif any(text in error for text in _FOLLOWS) or self.code == -signal.SIGABRT:
            kind = 3
        else:
            kind = 2
        return kind, self.ended


def how(code: int) -> str:
    """In words how a process ended, by its exit code."""
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
