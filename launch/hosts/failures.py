"""Failures: the status of each process, and which process failed first."""

import signal
from dataclasses import dataclass

from ..exit_codes import USER_ERROR
from .agent_channel import Host

_SECONDARY_ERRORS = ("Gloo", "coordination service", "CoordinationService", "Connection reset by peer", "heartbeat")
"""Errors of processes that lost another one."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why an attempt ended before its program did."""

    what: str
    code: int
    error: tuple[str, ...] = ()
    """The error output of the process that failed first."""
    retry: bool = True
    """Whether another attempt may succeed."""
    lost: tuple[Host, ...] = ()
    """Hosts that did not answer."""


@dataclass(kw_only=True)
class ProcessStatus:
    """What the supervisor knows about one process."""

    host: Host
    up: bool = False
    step: int | None = None
    last_report: float = 0.0
    """When its newest heartbeat came."""
    compiling: bool = False
    """Whether it is compiling a program."""
    finished: bool = False
    """Whether it has taken its last step."""
    code: int | None = None
    exited: float = 0.0

    def root_cause_order(self, error: str) -> tuple[int, float]:
        """Sort key of failed processes: the smallest most likely failed first, by its exit code, errors and time."""
        if self.code is not None and self.code < 0 and self.code != -signal.SIGABRT:
            kind = 0
        elif self.code == USER_ERROR:
            kind = 1
        elif any(text in error for text in _SECONDARY_ERRORS) or self.code == -signal.SIGABRT:
            kind = 3
        else:
            kind = 2
        return kind, self.exited


def describe_exit(code: int) -> str:
    """An exit code in words."""
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
