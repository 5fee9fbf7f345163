"""Silences Orbax (0.12.8), which logs pages of tracebacks for errors that we raise in one line."""

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any


@contextlib.contextmanager
def orbax_silenced() -> Iterator[None]:
    """Suppresses logs of errors that Orbax raises anyway, and of reads and writes that end after it gave up.

    Every Orbax thread that sees an error logs it with a traceback, and `asyncio` the errors that nobody awaits any
    more. At the first one Orbax closes its event loop, so that operations still in flight fail with "Event loop is
    closed": after an error all of this stays suppressed. Otherwise the hooks of Python and the filters of loggers are
    left as they were.
    """
    _SILENCE.hold()
    yield
    _SILENCE.release()


class _Silence:
    """Hooks and filters that are there while anybody holds them."""

    def __init__(self) -> None:
        self.lock, self.holders = threading.Lock(), 0
        self.behind: tuple[Any, Any] = (sys.excepthook, sys.unraisablehook)
        self.filters = {"absl": _is_of_others, "asyncio": _is_not_of_orbax}

    def hold(self) -> None:
        with self.lock:
            self.holders += 1
            if self.holders > 1:
                return
            for name, keep in self.filters.items():
                logging.getLogger(name).addFilter(keep)
            self.behind = sys.excepthook, sys.unraisablehook
            sys.excepthook, sys.unraisablehook = self.excepthook, self.unraisablehook

    def release(self) -> None:
        with self.lock:
            self.holders -= 1
            if self.holders:
                return
            for name, keep in self.filters.items():
                logging.getLogger(name).removeFilter(keep)
            if sys.excepthook == self.excepthook:  # else another one calls it
                sys.excepthook = self.behind[0]
            if sys.unraisablehook == self.unraisablehook:
                sys.unraisablehook = self.behind[1]

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread() or not _is_late(error):
            self.behind[0](kind, error, trace)

    def unraisablehook(self, about: Any) -> None:
        if not _is_late(about.exc_value):
            self.behind[1](about)


def _is_late(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


def _is_of_others(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _names_orbax(record))


def _names_orbax(record: logging.LogRecord) -> bool:
    """Whether an error is of a task that Orbax defines, was raised below a function of Orbax, or is TensorStore's."""
    trace = record.exc_info[2] if record.exc_info else None
    texts = [record.getMessage(), *(frame.filename for frame in traceback.extract_tb(trace))]
    return any(name in text for text in texts for name in ("/orbax/", "tensorstore_spec="))


_SILENCE = _Silence()
