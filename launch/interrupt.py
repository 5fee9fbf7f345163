"""Ctrl-C and SIGTERM as a request that a loop answers at the end of its step, all processes at the same one."""

import contextlib
import os
import signal
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self

from sharding import processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HEARD = b"\nstopping after this step; once more to stop at once\n"


@dataclass(kw_only=True)
class Interrupt:
    """While entered, the first signal sets `asked`; a second one acts as it does elsewhere.

    Of several processes each hears SIGTERM through JAX, which tells the others; Ctrl-C is for their launcher.
    """

    asked: bool = False
    _before: dict[signal.Signals, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        if processes.count() > 1:
            return self
        # Only the main thread may set a handler.
        try:
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        except ValueError:
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def before(self, step: int) -> bool:
        """Whether to stop before `step`. Asked before every step."""
        return self.asked or processes.stops(step)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()
        # A handler may come in the middle of a print: this one goes past Python's buffers.
        with contextlib.suppress(OSError):
            os.write(2, HEARD)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
