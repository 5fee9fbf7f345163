"""A signal stops a run after its step: the first one, in all processes alike, and Python's own handlers come back."""

import contextlib
import signal
import threading
from types import SimpleNamespace

import pytest
from jax.experimental import multihost_utils

from sharding.distributed import processes
from sharding.launch.stop_signals import NOTICE, SIGNALS, StopRequest


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch):
    """The signals that reach the handlers from before."""
    found: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: found.append(number)) for number in SIGNALS}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_request_and_the_next_is_as_before(number: signal.Signals, received, capfd):
    with StopRequest() as stop:
        assert not stop.should_stop(1) and not stop.requested
        signal.raise_signal(number)
        assert stop.should_stop(2) and not received and capfd.readouterr().err == NOTICE.decode()
        for again in SIGNALS:
            signal.raise_signal(again)
        assert received == [*SIGNALS] and not capfd.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_come_back_without_a_signal(fails: bool, received):
    before = [signal.getsignal(number) for number in SIGNALS]
    with contextlib.suppress(KeyError), StopRequest() as stop:
        assert [signal.getsignal(number) for number in SIGNALS] != before
        if fails:
            raise KeyError
    assert [signal.getsignal(number) for number in SIGNALS] == before and not stop.requested


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_leave_signals_to_jax(count: int, received, monkeypatch: pytest.MonkeyPatch):
    """They stop before the step that all agree on: one that stopped by itself would leave the others waiting."""
    state = SimpleNamespace(client=None, process_id=1, num_processes=count)
    monkeypatch.setattr(processes.compat, "distributed", lambda: state)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: step == 7)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM] and not stop.requested
        assert [step for step in range(1, 10) if stop.should_stop(step)] == [7]


def test_beside_the_main_thread_there_is_no_handler(received):
    found = []

    def run():
        with StopRequest() as stop:
            found.append(stop.should_stop(1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]
