"""Output to a pipe that its reader closes, as in `sharding --help | head -1`."""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sharding.distributed import processes

from .exit_codes import READER_GONE


@contextmanager
def exits_if_reader_gone() -> Iterator[None]:
    """Exits without a traceback where standard output's reader is gone, as other commands do.

    A broken connection raises the same error, so standard output is asked whether it is the broken one.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # as it is where the shell closed it
                sys.stdout.flush()
    except BrokenPipeError:
        if sys.stdout is None or not _reader_is_gone():
            raise
        # Python flushes standard output once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        processes.exit_if_multiprocess(READER_GONE)
        sys.exit(READER_GONE)


def _reader_is_gone() -> bool:
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are reported in any case
    return bool(poll.poll(0))
