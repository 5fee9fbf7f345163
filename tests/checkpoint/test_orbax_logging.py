"""Only Orbax's own noise is silenced."""

import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from sharding.checkpoint.orbax_logging import silence_orbax

LATE, OTHER = RuntimeError("Event loop is closed"), RuntimeError("another error")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The errors that reach Python's own hooks behind those installed."""
    found: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: found.append(error))
    monkeypatch.setattr(sys, "unraisablehook", lambda about: found.append(about.exc_value))
    monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
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
