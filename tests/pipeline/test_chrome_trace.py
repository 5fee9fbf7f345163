"""The trace: valid Trace Event Format, and no overlapping tasks on a device."""

import json

import pytest
from support.all_schedules import GRID, cases_by_schedule, make_schedule


@pytest.mark.parametrize(*cases_by_schedule(GRID[::7]))
def test_events(cases, tmp_path):
    for case in cases:
        check_events(make_schedule(*case), tmp_path)


def check_events(schedule, tmp_path):
    simulation = schedule.simulate(send=0.5)
    simulation.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {device: f"device {device}" for device in range(schedule.devices)}
    for device, order in enumerate(schedule.orders):
        found = [event for event in events if event["ph"] == "X" and event["tid"] == device]
        assert [event["args"] for event in found] == [task._asdict() for task in order]
        assert [event["ts"] for event in found] == pytest.approx([1000 * start for start in simulation.starts[device]])
        assert all(event["dur"] > 0 and event["pid"] == 0 and event["cat"] and event["name"] for event in found)
        for before, after in zip(found, found[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
