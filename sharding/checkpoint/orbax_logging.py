"""Silences Orbax (0.12.8), which logs pages of tracebacks for errors that we raise in one line."""

import functools
import logging
import sys
import threading
import traceback
from types import TracebackType
from typing import Any


@functools.cache  # once
def silence_orbax() -> None:
    """Suppresses logs of errors that Orbax raises anyway, and of reads and writes that end after it gave up.

    Every Orbax thread that sees an error logs it with a traceback, and `asyncio` the errors that nobody awaits any
    more. At the first one Orbax closes its event loop, so that operations still in flight fail with "Event loop is
    closed".
    """
    logging.getLogger("absl").addFilter(lambda record: not (record.exc_info and "orbax" in record.pathname))
    logging.getLogger("asyncio").addFilter(lambda record: not (record.exc_info and _names_orbax(record)))
    of_exceptions, of_unraisable = sys.excepthook, sys.unraisablehook

    def is_late(error: BaseException | None) -> bool:
        return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread() or not is_late(error):
            of_exceptions(kind, error, trace)

    def unraisablehook(about: Any) -> None:
        if not is_late(about.exc_value):
            of_unraisable(about)

    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook


def _names_orbax(record: logging.LogRecord) -> bool:
    """Whether an error is of a task that Orbax defines, was raised below a function of Orbax, or is TensorStore's."""
    trace = record.exc_info[2] if record.exc_info else None
    texts = [record.getMessage(), *(frame.filename for frame in traceback.extract_tb(trace))]
    return any(name in text for text in texts for name in ("/orbax/", "tensorstore_spec="))
