"""Only Orbax's own noise is silenced."""

import asyncio
import gc
import logging
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sharding.checkpoint.orbax_logging import silence_orbax

LATE, OTHER = RuntimeError("Event loop is closed"), RuntimeError("another error")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The errors that reach Python's own hooks behind those installed."""
    found: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: found.append(error))
    monkeypatch.setattr(sys, "unraisablehook", lambda about: found.append(about.exc_value))
    for logger in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(logger), "filters", [])
    silence_orbax.__wrapped__()
    return found


def test_errors_of_a_closed_loop_are_silent_beside_the_main_thread(shown: list[BaseException]):
    def report() -> None:
        for error in (LATE, OTHER, ValueError("Event loop is closed")):
            sys.excepthook(type(error), error, None)

    thread = threading.Thread(target=report)
    thread.start()
    thread.join()
    assert [type(error) for error in shown] == [RuntimeError, ValueError] and shown[0] is OTHER
    sys.excepthook(RuntimeError, LATE, None)  # in the main thread
    assert shown[2:] == [LATE]


def test_unraisable_errors(shown: list[BaseException]):
    for error in (LATE, OTHER, None):
        sys.unraisablehook(SimpleNamespace(exc_value=error))
    assert shown == [OTHER, None]


def test_tracebacks_of_orbax_are_not_logged(shown: list[BaseException]):
    (keep,) = logging.getLogger("absl").filters
    records = [
        SimpleNamespace(exc_info=info, pathname=path)
        for info in (None, (RuntimeError, LATE, None))
        for path in ("site-packages/orbax/x.py", "site-packages/other/x.py")
    ]
    assert [bool(keep(record)) for record in records] == [True, True, False, True]


async def fails() -> None:
    raise OTHER


def test_forgotten_errors_of_orbax_are_not_logged(shown: list[BaseException], caplog: pytest.LogCaptureFixture):
    """Those that nobody awaits, which `asyncio` logs with the file that defines the task, or with a traceback."""
    theirs: dict[str, Any] = {}
    source = "async def fails(error):\n    raise error\n\ndef writes(error):\n    raise error"
    exec(compile(source, "site-packages/orbax/x.py", "exec"), theirs)

    async def forget() -> None:
        loop = asyncio.get_running_loop()
        waiting = [asyncio.create_task(fails()), asyncio.create_task(theirs["fails"](ValueError()))]
        waiting.append(loop.run_in_executor(None, theirs["writes"], KeyError()))
        waiting.append(loop.create_future())
        waiting[-1].set_exception(OSError("DATA_LOSS: Error opening driver [tensorstore_spec='{}']"))
        await asyncio.wait(waiting)

    asyncio.run(forget())
    gc.collect()
    logged = [type(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert logged == [RuntimeError]
