"""Only Orbax's own noise is silenced."""

import asyncio
import gc
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from sharding import checkpoint
from sharding.checkpoint import orbax_logging
from sharding.checkpoint.orbax_logging import orbax_silenced

LATE, OTHER = RuntimeError("Event loop is closed"), RuntimeError("another error")


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch) -> orbax_logging._Silence:
    """One that no error before keeps."""
    for logger in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(logger), "filters", [])
    found = orbax_logging._Silence()
    monkeypatch.setattr(orbax_logging, "_SILENCE", found)
    return found


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, silence: orbax_logging._Silence) -> Iterator[list[BaseException]]:
    """The errors that reach Python's own hooks behind those installed."""
    found: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: found.append(error))
    monkeypatch.setattr(sys, "unraisablehook", lambda about: found.append(about.exc_value))
    with orbax_silenced():
        yield found


def state() -> tuple[Any, ...]:
    """What the process has of hooks and filters."""
    return sys.excepthook, sys.unraisablehook, *([*logging.getLogger(name).filters] for name in ("absl", "asyncio"))


def test_hooks_and_filters_are_as_before_once_a_checkpoint_is_saved_and_read(tmp_path: Path):
    before, tree = state(), {"x": jnp.arange(4.0)}
    with checkpoint.Saver(tmp_path) as saver:
        saver.save(1, tree)
        assert state() != before  # the save goes on
        assert checkpoint.latest_step(tmp_path) in (None, 1)
        assert state() != before
    assert state() == before
    checkpoint.save(tmp_path, 2, tree).wait()
    checkpoint.restore(tmp_path, tree)
    assert state() == before


def test_hooks_stay_after_an_error_and_of_another_package(silence: orbax_logging._Silence):
    before = state()

    def theirs(*_: Any) -> None:
        pass

    try:
        with orbax_silenced():
            sys.excepthook = theirs  # installed meanwhile
        assert sys.excepthook is theirs and sys.unraisablehook is before[1]
    finally:
        sys.excepthook = before[0]
    with pytest.raises(OSError, match="full"), orbax_silenced():
        raise OSError("full")
    assert state() != before
    silence.release()
    assert state() == before


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
