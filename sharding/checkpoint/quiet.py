"""Orbax (0.12.8) prints pages about what goes wrong; an error of ours says it in a line."""

import functools
import logging
import sys
import threading
from types import TracebackType
from typing import Any


@functools.cache  # once
def silence_orbax() -> None:
    """Nothing is printed of what Orbax raises anyway, nor of reads and writes that end after it gave up.

    It logs an error in each of its threads that sees it, with a traceback. At the first one it closes its event loop,
    which what is still under way then finds closed.
    """
    logging.getLogger("absl").addFilter(lambda record: not (record.exc_info and "orbax" in record.pathname))
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
