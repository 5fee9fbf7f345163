"""Graceful stop: on Ctrl-C or SIGTERM (preemption), all processes stop after the same step."""

import contextlib
import os
import signal
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self

from sharding.distributed import processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nstopping after this step; repeat to stop immediately\n"


@dataclass(kw_only=True)
class StopRequest:
    """A context in which the first signal sets `requested`; a second one has its usual effect.

    With several processes JAX handles SIGTERM and notifies the others; the launcher handles Ctrl-C.
    """

    requested: bool = False
    _before: dict[signal.Signals, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        if processes.count() > 1:
            return self
        # Only the main thread may set a handler.
        try:
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        except ValueError:
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def should_stop(self, step: int) -> bool:
        """Whether to stop before `step`. Call it before every step."""
        return self.requested or processes.preempted(step)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        # The handler may interrupt a print, so write past Python's buffers.
        with contextlib.suppress(OSError):
            os.write(2, NOTICE)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
