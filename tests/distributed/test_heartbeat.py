"""Reports of a process to its supervisor: one a line, in order, and nothing where nobody listens."""

import contextlib
import os

import pytest

from sharding.distributed import heartbeat


def work(end: type[Exception] | None = None):
    """All reports of a short run, whose compilation fails if `end` is an error."""
    heartbeat.report(heartbeat.UP)
    with contextlib.suppress(KeyError), heartbeat.reporting_compilation():
        if end:
            raise end
    heartbeat.report_working()
    heartbeat.report_step(12)
    heartbeat.report_finished()


@pytest.mark.parametrize("end", [None, KeyError])
def test_reports_come_in_order(end, monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    monkeypatch.setenv(heartbeat.HEARTBEAT_FD, str(writer))
    work(end)
    os.close(writer)
    with open(reader) as lines:
        found = lines.read().splitlines()
    assert found == [
        "up",
        "compiling",
        "working",
        "working",
        "12",
        "finished",
    ]  # the compilation ends, even if it fails
    assert {*found} - {"12"} == {*heartbeat.STATUSES}


def test_a_supervisor_that_is_gone_ends_no_work(monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setenv(heartbeat.HEARTBEAT_FD, str(writer))
    work()
    os.close(writer)
    work()  # the descriptor is closed, too


def test_without_a_supervisor_nothing_is_written(monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.delenv(heartbeat.HEARTBEAT_FD, raising=False)
    work()
    assert tuple(capfd.readouterr()) == ("", "")
